"""The trajectories of all rollouts: search, recording and eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from router_core.weights import WeightVersions
from slime_radix_cache.index.finding import Finder
from slime_radix_cache.index.limits import Limits
from slime_radix_cache.index.losses import Count, Digest, Losses
from slime_radix_cache.index.prompt_segments import confirm
from slime_radix_cache.index.segment_store import Sampled, SegmentStore
from slime_radix_cache.index.segments import Context, Giver, Prompt, Response, Segment, links, prior_response
from slime_radix_cache.index.sessions import Running, Sessions
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.text_search import Around, Cut, Match
from slime_radix_cache.index.unanswered import Request
from slime_sglang.evidence import CONTRADICTION

__all__ = ["Limits", "Trajectories"]


class Trajectories(SegmentStore):
    """All recorded contexts. Every method is synchronous, so on one event loop they need no lock."""

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
        self._last_seen: str | None = None

    # Search: nothing is changed. See Finder.

    def find_to_continue(self, text: bytes, session: str | None = None) -> Match:
        """See :meth:`Finder.to_continue`."""
        return self._finder.to_continue(text, session)

    def find_given(self, ids: bytes, session: str | None = None, text: bytes = b"") -> Context:
        """See :meth:`Finder.given`."""
        return self._finder.given(ids, session, text)

    def decoded(self, ids: bytes) -> tuple[Response | None, int]:
        """See :meth:`Finder.decoded`."""
        return self._finder.decoded(ids)

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
        """Return True if a context with this text was evicted, or could not be recorded. May be a false positive."""
        return text in self.losses.texts

    def responses_of(self, session: str) -> list[Response]:
        """Return the kept responses of ``session``, oldest first."""
        return self._sessions.of(session)

    @property
    def sessions(self) -> Sessions:
        """The kept responses by session."""
        return self._sessions

    @property
    def session_count(self) -> int:
        """The number of sessions with a kept response."""
        return len(self._sessions)

    def newest_sessions(self) -> Iterator[str]:
        """See :meth:`Sessions.newest`."""
        return self._sessions.newest()

    def longer_of(self, session: str) -> dict[Response, Response]:
        """Map each record of ``session`` with only the beginning of a response to that response's longest record."""
        return {one: self.longer.longest(one) for one in self.responses_of(session) if one in self.longer}

    def has_lost(self, session: str) -> bool:
        """Return True if records of ``session`` may be lost, inexact, or in another router. O(1)."""
        return session in self.losses.sessions or session in self.losses.open

    # Running requests.

    def begin(self, running: Running) -> None:
        """Add a running request; :meth:`end` removes it. From now on it counts as a request of its session."""
        self._sessions.begin(running)

    def end(self, running: Running, *, is_recorded: bool) -> None:
        """Remove a running request. If its answer is not recorded, it still counts as a request of its session."""
        forgotten = self._sessions.end(running, is_recorded=is_recorded)
        if forgotten is not None:
            self._forget(forgotten)

    def is_running(self, session: str) -> bool:
        """Return True while a request of ``session`` runs."""
        return self._sessions.is_running(session)

    def _forget(self, session: str) -> None:
        """Mark ``session`` as incomplete: one of its unanswered requests was forgotten."""
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
        known: Node | None = None,
    ) -> Response:
        """Record the tokens that an engine consumed and sampled.

        The engine consumed ``context``, which is pinned, and then ``prompt_ids``; the text of both is ``prompt``.
        ``giver``: the client that gave these ids. ``again``: the earlier record of the same sequence, which is
        returned if it is equal. ``instead_of``: the recorded beginning of this response; it is withdrawn if nothing
        continues it. It must not be an earlier attempt that the engine did not continue, even if the tokens are equal.

        ``known``: the node at which ``context`` was found, on the path to the end of ``prompt``; None if unknown.
        """
        doubt = CONTRADICTION if sampled.doubt == CONTRADICTION else None
        if giver is not None:
            _give(context, giver)
        if known is not None and (context is None or context[0] not in known.ends):
            known = None  # no pinned segment ends there, so the node may have been removed
        asked = self._prompt(context, prompt_ids, prompt, doubt, giver, known) if prompt_ids else None
        if asked is not None:
            begin = asked.node
            context = asked, len(asked)
        else:
            if context is not None and isinstance(context[0], Prompt):
                confirm(context[0], doubt)
            begin = self._prompt_end(context, prompt, known)
        response = self._response(context, begin, sampled, session, again, instead_of)
        if doubt is not None and session is not None:
            self.losses.sessions.add(session)
        for version, _ in sampled.versions:
            if version is not None:
                self._see(version)
        used = [one for one in (response, asked) if one is not None and one.generation >= 0]
        self._ages.remove(used)
        self._append(used)
        if instead_of is not None and instead_of is not response:
            self.withdraw(instead_of)
        self._keep_to_limits(response)
        return response

    def lose(self, session: str | None, *texts: bytes | Digest) -> None:
        """Mark ``session`` and ``texts`` as lost. Without texts, the lost text is not known."""
        if session is not None:
            self.losses.sessions.add(session)
        for text in texts or (b"",):  # after any mark, all counts of candidates are lower bounds
            self.losses.texts.add(text)

    def withdraw(self, part: Response) -> None:
        """Remove ``part``, which a longer record replaces. If something continues ``part``, keep it."""
        if part in part.node.ends and not self.is_needed(part):
            self._remove(part)

    def is_needed(self, segment: Segment) -> bool:
        """Return True if a request in flight, another segment (even demoted) or another router may need ``segment``."""
        if segment.children or segment.pins:
            return True
        return self.demotion is not None and self.demotion.is_continued(segment)

    # Eviction.

    def see_version(self, version: str) -> None:
        """Note that engines serve ``version``, then evict (with a store: demote) what exceeds the limits."""
        self._see(version)
        self._keep_to_limits()

    def _see(self, version: str) -> None:
        if version == self._last_seen:
            return  # the usual case, without copies of all versions
        self._last_seen = version
        before = self._versions.ordered
        self._versions.see(version)
        after = self._versions.ordered
        if after[-1:] != before[-1:]:
            self._generation += 1

    def forget(self, session: str) -> None:
        """Evict the responses of ``session`` and the prompts before them, except needed ones: see :meth:`is_needed`.

        The session is not complete from then on. O(evicted segments).
        """
        for response in reversed(self._sessions.of(session)):
            segment: Segment | None = response if response in response.node.ends else None
            while segment is not None and not self.is_needed(segment):
                if isinstance(segment, Response) and segment.session != session:
                    break
                before = segment.parent
                self.evict(segment, "deleted")
                segment = before
        # Later answers, also to requests that wait now, do not make the session complete again.
        self.losses.sessions.add(session)

    def _keep_to_limits(self, newest: Segment | None = None) -> None:
        """Evict the oldest unpinned segments, but not ``newest``, until the limits hold. O(evicted).

        With a store, only ask for demotion.
        """
        if self.demotion is not None:
            if (first := self._ages.oldest) is not None and self._overdue(first) is not None:
                self.demotion.notice()
            return
        while (oldest := self._ages.oldest) is not None and oldest is not newest:
            reason = self._overdue(oldest)
            if reason is None:
                return
            self.evict(oldest, reason)

    def _overdue(self, segment: Segment, tokens: int = 0, size_bytes: int = 0) -> str | None:
        """Return the reason to evict ``segment``, or None. ``tokens`` and ``size_bytes`` count as evicted already."""
        unused = self._generation - segment.generation
        return self._limits.exceeded(unused, self.tokens - tokens, self.size_bytes - size_bytes)

    def overdue(self, most_bytes: int) -> list[tuple[Segment, str]]:
        """Return about ``most_bytes`` of segments to evict next, each with the reason. Children come before parents."""
        found: list[tuple[Segment, str]] = []
        tokens = size_bytes = 0
        segment = self._ages.oldest
        while segment is not None and size_bytes < most_bytes:
            reason = self._overdue(segment, tokens, size_bytes)
            if reason is None:
                break
            found.append((segment, reason))
            tokens += len(segment)
            size_bytes += segment.size_bytes
            segment = segment.newer
        return found

    @property
    def is_crowded(self) -> bool:
        """True if the limit of tokens or bytes is exceeded by more than a quarter, and some segment is not pinned."""
        fits = self._limits.exceeded(-1, self.tokens * 4 // 5, self.size_bytes * 4 // 5) is None
        return self._ages.oldest is not None and not fits

    def evict(self, segment: Segment, reason: str) -> None:
        """Evict ``segment``, which nothing continues. Its session and its text are marked as lost."""
        self._evict(segment)
        self.evicted[reason] += 1

    def demote(self, segment: Segment) -> list[Request]:
        """Remove ``segment``, which is in the store; return the unanswered requests that continued it."""
        requests = self._sessions.unanswered.evicted(segment)
        self._remove(segment)
        return requests

    def _evict(self, segment: Segment) -> None:
        assert segment.children == 0, "a segment is older than its parent, so a leaf is evicted first"
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
        """Note in the response before ``response``, of the same session, that its continuation is lost."""
        before = prior_response(response) if response.session is not None else None
        if before is not None:
            before.continuation_lost = True


def _give(context: Context, giver: Giver) -> None:
    """Add ``giver``, which gave these ids too, to the prompts in ``context`` that clients gave as ids."""
    for segment, kept in links(context):
        if not isinstance(segment, Prompt) or segment.giver is None or kept < len(segment):
            continue
        givers = segment.giver.with_another(giver.sessions)
        if givers is segment.giver:  # this prompt and those before it have the giver, or enough others
            return
        segment.giver = givers
