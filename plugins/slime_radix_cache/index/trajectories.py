"""The trajectories of all rollouts: what is found, recorded and forgotten, behind one small set of verbs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from router_core.weights import WeightVersions
from slime_radix_cache.index.finding import Finder
from slime_radix_cache.index.losses import Count, Losses
from slime_radix_cache.index.segment_store import Sampled, SegmentStore, confirm
from slime_radix_cache.index.segments import Context, Giver, Prompt, Response, Segment, links, said_before
from slime_radix_cache.index.sessions import Running
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.text_search import Around, Cut, Match
from slime_sglang.evidence import CONTRADICTION

__all__ = ["Limits", "Trajectories"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the cache: tokens, bytes, and uses no older than ``versions`` weight versions. 0 is no limit."""

    tokens: int = 0
    size_bytes: int = 0
    versions: int = 5


class Trajectories(SegmentStore):
    """Contexts by text. Every method is synchronous and leaves it whole: one event loop needs no lock."""

    def __init__(
        self,
        limits: Limits,
        cut: Cut,
        around: Around = lambda text, position: None,
        losses: Losses | None = None,
    ) -> None:
        super().__init__()
        self.evicted: Counter[str] = Counter()
        self.losses = losses if losses is not None else Losses()
        self._limits = limits
        self._finder = Finder(self._index, self._starts, self._sessions, self.losses, cut, around)
        self._versions = WeightVersions()

    # Looking: nothing is changed. See Finder.

    def find_to_continue(self, text: bytes, session: str | None = None) -> Match:
        """See :meth:`Finder.to_continue`."""
        return self._finder.to_continue(text, session)

    def find_given(self, ids: bytes, session: str | None = None, text: bytes = b"") -> Context:
        """See :meth:`Finder.given`."""
        return self._finder.given(ids, session, text)

    def may_take(self, ids: bytes, session: str) -> bool:
        """See :meth:`Finder.may_take`."""
        return self._finder.may_take(ids, session)

    def find_to_read(self, text: bytes, session: str | None = None) -> Match:
        """See :meth:`Finder.to_read`."""
        return self._finder.to_read(text, session)

    def candidates(self, text: bytes, match: Match | None = None) -> Count:
        """See :meth:`Finder.candidates`."""
        return self._finder.candidates(text, match)

    def is_lost(self, text: bytes) -> bool:
        """True when a context with this text was recorded and had to go, or could not be recorded."""
        return text in self.losses.texts

    def responses_of(self, session: str) -> list[Response]:
        """Return the responses of ``session`` that are kept, oldest first."""
        return self._sessions.of(session)

    def longer_of(self, session: str) -> dict[Response, Response]:
        """See :meth:`Sessions.longer`: a client went on from these beginnings before all had come."""
        return self._sessions.longer(session)

    def has_lost(self, session: str) -> bool:
        """True when a response of ``session`` had to go, or could not be recorded. O(1); rarely true without that."""
        return session in self.losses.sessions

    # Requests under way.

    def begin(self, running: Running) -> None:
        """A request is on its way; to be given to :meth:`end`. Its session speaks there from now on."""
        self._sessions.begin(running)

    def end(self, running: Running, *, is_recorded: bool) -> None:
        """It is over. Without a record, too, its session has spoken there."""
        forgotten = self._sessions.end(running, is_recorded=is_recorded)
        if forgotten is not None:
            self._forget(forgotten)

    def _forget(self, session: str) -> None:
        """An unanswered request of ``session`` had to be forgotten."""
        self.losses.sessions.add(session)

    # Recording.

    def record(
        self,
        context: Context,
        prompt_ids: bytes,
        prompt: bytes,
        sampled: Sampled,
        session: str | None = None,
        giver: Giver | None = None,
        again: Response | None = None,
        instead_of: Response | None = None,
    ) -> Response:
        """Keep what an engine consumed and sampled.

        It consumed ``context``, which is pinned, and then ``prompt_ids``; the text of both is ``prompt``. ``giver``:
        the client that gave these ids. ``again``: what was recorded of the same sequence before; if that was all, it
        stays. ``instead_of``: the recorded beginning of this response, which is withdrawn unless somebody went on from
        it. An attempt that was made anew is no such beginning, although its tokens may be the same.
        """
        doubt = CONTRADICTION if sampled.doubt == CONTRADICTION else None
        if giver is not None:
            _give(context, giver)
        asked = self._prompt(context, prompt_ids, prompt, doubt, giver) if prompt_ids else None
        if asked is not None:
            begin = asked.node
            context = asked, len(asked)
        else:
            if context is not None and isinstance(context[0], Prompt):
                confirm(context[0], doubt)
            begin = self._prompt_end(context, prompt)
        response = self._response(context, begin, sampled, session, again, instead_of)
        if doubt is not None and session is not None:
            self.losses.sessions.add(session)
        for version, _ in sampled.versions:
            if version is not None:
                self._see(version)
        for segment in (response, asked):
            if segment is not None and segment.pins == 0:
                self._ages.remove(segment)
                self._append(segment)
        if instead_of is not None and instead_of is not response:
            self.withdraw(instead_of)
        self._keep_to_limits(response)
        return response

    def lose(self, session: str | None, *texts: bytes) -> None:
        """Remember that something of ``session`` is lost, with one of these texts, or none that is known."""
        if session is not None:
            self.losses.sessions.add(session)
        for text in texts or (b"",):  # one mark at least: nobody can count all candidates any more
            self.losses.texts.add(text)

    def withdraw(self, part: Response) -> None:
        """Forget ``part``, of which more is recorded by now, if nothing goes on from it."""
        if part in part.node.ends and not part.children and not part.pins:
            self._remove(part)

    # Forgetting.

    def see_version(self, version: str) -> None:
        """The engines serve ``version``: what was not used within the last versions goes."""
        self._see(version)
        self._keep_to_limits()

    def _see(self, version: str) -> None:
        before = self._versions.ordered
        self._versions.see(version)
        after = self._versions.ordered
        if after[-1:] != before[-1:]:
            self._generation += 1

    def forget(self, session: str) -> None:
        """Evict what ``session`` was answered, but what is in flight, or another session goes on from. O(what goes).

        Nothing of it is complete any more, under this name.
        """
        for response in reversed(self._sessions.of(session)):
            segment: Segment | None = response if response in response.node.ends else None
            while segment is not None and not segment.children and not segment.pins:
                if isinstance(segment, Response) and segment.session != session:
                    break
                before = segment.parent
                self._evict(segment)
                self.evicted["deleted"] += 1
                segment = before
        self.losses.sessions.add(
            session
        )  # what it is answered yet, of requests that still wait too, is nobody's

    def _keep_to_limits(self, newest: Segment | None = None) -> None:
        """Evict the oldest until the limits hold, or all that is left is in flight or the ``newest``. O(what goes)."""
        limits = self._limits
        while (oldest := self._ages.oldest) is not None and oldest is not newest:
            if limits.versions and oldest.generation <= self._generation - limits.versions:
                reason = "weight_version"
            elif limits.tokens and self.tokens > limits.tokens:
                reason = "max_tokens"
            elif limits.size_bytes and self.size_bytes > limits.size_bytes:
                reason = "max_bytes"
            else:
                return
            self._evict(oldest)
            self.evicted[reason] += 1

    def _evict(self, segment: Segment) -> None:
        assert segment.children == 0, "a segment is older than what it continues, so a leaf goes first"
        session = None
        texts = [text_of(segment.node)]
        if isinstance(segment, Response):
            session = segment.session
            if segment.end is not segment.node:
                texts.append(text_of(segment.end))
            self._note_loss(segment)
        self.lose(session, *texts)
        self._remove(segment)

    def _note_loss(self, response: Response) -> None:
        """Note that the session's response before is a leaf from now on, but not the session's end."""
        before = said_before(response) if response.session is not None else None
        if before is not None:
            before.continuation_lost = True


def _give(context: Context, giver: Giver) -> None:
    """``giver`` gave all ids of ``context``, those that another client had given first, too."""
    for segment, kept in links(context):
        if not isinstance(segment, Prompt) or segment.giver is None or kept < len(segment):
            continue
        told = segment.giver.with_another(giver.sessions)
        if told is segment.giver:  # then it gave the ids before that, too
            return
        segment.giver = told
