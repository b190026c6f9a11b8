"""The trajectories of all rollouts: truth, index, ages and limits behind one small set of verbs."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router_core.weights import WeightVersions
from slime_radix_cache.ages import Ages
from slime_radix_cache.matching import Around, Cut, Match, find_given, find_to_continue, find_to_read
from slime_radix_cache.segments import (
    Context,
    Prompt,
    Response,
    Segment,
    Versions,
    ids_before,
    links,
    said_before,
)
from slime_radix_cache.starts import Starts
from slime_radix_cache.text_index import Node, TextIndex, text_of

__all__ = ["Limits", "Sampled", "Trajectories"]

# What CPython 3.11 spends on an object of each kind with all that hangs on it, packed values and text left out.
_NODE_BYTES = 190
_PROMPT_BYTES = 210
_RESPONSE_BYTES = 620
_SESSION_BYTES = 240
#: Turns of a session that are looked at to see whether a text is a continuation of one.
_TURNS_LOOKED_AT = 16
#: Texts remembered, as hashes, after they were evicted: so that an answer can say why it is not exact.
_LOST_TEXTS = 16_384


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept: tokens, bytes, and uses no older than ``versions`` weight versions. 0 is no limit."""

    tokens: int = 0
    size_bytes: int = 0
    versions: int = 5


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine answered, ready to be kept.

    ``ids`` and ``logprobs`` are packed (see Response). ``text`` is what the client saw; the first ``visible``
    tokens spell it (-1: it ends inside a token), the others spell ``tail``.
    """

    ids: bytes
    logprobs: bytes | None
    text: str
    visible: int
    tail: str
    versions: Versions
    finish_reason: str


class Trajectories:
    """Contexts by text. Every method is synchronous and leaves it whole: one event loop needs no lock."""

    def __init__(self, limits: Limits, cut: Cut, around: Around = lambda text, position: None) -> None:
        self.tokens = 0
        self.segments = 0
        self.evicted: Counter[str] = Counter()
        self._limits = limits
        self._cut = cut
        self._around = around
        self._index = TextIndex()
        self._starts = Starts()
        self._ages = Ages()
        self._payload_bytes = 0
        self._sessions: dict[str, list[Response]] = {}
        self._incomplete: set[str] = set()
        self._versions = WeightVersions()
        self._generation = 0
        self._lost: OrderedDict[int, None] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Memory in use, text and bookkeeping included, as far as it can be counted."""
        counts = self._index.nodes * _NODE_BYTES + len(self._sessions) * _SESSION_BYTES
        return self._payload_bytes + self._index.size_bytes + counts

    # Looking: nothing is changed.

    def find_to_continue(self, text: bytes, session: str | None = None) -> Match:
        """Where generating from ``text`` goes on; what lies behind the match is to be tokenised."""
        own = self._known(session)

        def follows(response: Response) -> bool:
            start = response.start
            return start < len(text) and text.startswith(text_of(response.node)[:start])

        inherited = partial(self._inherited, own, follows)
        return find_to_continue(self._index.walk(text), text, self._cut, self._around, own, inherited)

    def find_given(self, ids: bytes, session: str | None = None) -> Context:
        """The longest context that ``ids`` (packed) begin with."""
        own = self._known(session)

        def follows(response: Response) -> bool:
            before = ids_before(response)
            return len(before) < len(ids) and ids.startswith(before)

        return find_given(list(self._starts.along(ids)), ids, own, partial(self._inherited, own, follows))

    def find_to_read(self, text: bytes, session: str | None = None) -> Match:
        """The context that ``text`` stands for."""
        return find_to_read(self._index.walk(text), text, self._cut, self._around, self._known(session))

    def _known(self, session: str | None) -> str | None:
        return session if session in self._sessions else None

    def _inherited(self, session: str | None, follows: Callable[[Response], bool]) -> set[Response] | None:
        """Responses in the contexts in which ``session`` spoke (of late) where what is asked now ``follows``.

        None when it has not spoken there.
        """
        if session is None:
            return None
        spoken = list(filter(follows, self._sessions[session][-_TURNS_LOOKED_AT:]))
        chains = (links((response, len(response))) for response in spoken)
        return {one for chain in chains for one, _ in chain if isinstance(one, Response)} if spoken else None

    def was_evicted(self, text: bytes) -> bool:
        """True when a context with this text was recorded and had to go (of late: old losses are forgotten)."""
        return hash(text) in self._lost

    def responses_of(self, session: str) -> list[Response]:
        """What ``session`` was answered and is kept, oldest first."""
        return list(self._sessions.get(session, ()))

    def has_lost(self, session: str) -> bool:
        """True when something of ``session``, of which more is kept, had to go."""
        return session in self._incomplete

    # Contexts in flight.

    def pin(self, context: Context) -> None:
        """Keep ``context`` until :meth:`unpin`; to be called once for each."""
        for segment, _ in links(context):
            segment.pins += 1
            if segment.pins == 1:
                self._ages.remove(segment)

    def unpin(self, context: Context) -> None:
        """Undo one :meth:`pin`; the context counts as used now."""
        for segment, _ in links(context):
            segment.pins -= 1
            if segment.pins == 0:
                self._append(segment)

    # Recording.

    def record(
        self,
        context: Context,
        prompt_ids: bytes,
        prompt: bytes,
        sampled: Sampled,
        session: str | None = None,
    ) -> Response:
        """Keep what an engine consumed and sampled, as facts.

        It consumed ``context``, which is pinned, and then ``prompt_ids``; the text of both is ``prompt``. The same
        fact told twice is kept once.
        """
        asked = self._prompt(context, prompt_ids, prompt) if prompt_ids else None
        if asked is not None:
            context = asked, len(asked)
        response = self._response(context, prompt, sampled, session)
        for version, _ in sampled.versions:
            if version is not None:
                self._see(version)
        for segment in (response, asked):
            if segment is not None and segment.pins == 0:
                self._ages.remove(segment)
                self._append(segment)
        self._keep_to_limits(response)
        return response

    def _prompt(self, context: Context, ids: bytes, text: bytes) -> Prompt:
        node = self._index.insert(text)
        parent, kept = context if context is not None else (None, 0)
        for segment in node.ends:
            if (
                isinstance(segment, Prompt)
                and segment.parent is parent
                and segment.kept == kept
                and segment.ids == ids
            ):
                return segment
        prompt = Prompt(context, ids, node)
        self._index.attach(prompt, node)
        self._add(prompt, _PROMPT_BYTES)
        return prompt

    def _response(self, context: Context, prompt: bytes, sampled: Sampled, session: str | None) -> Response:
        node = self._visible_end(context, prompt, sampled.text.encode())
        newest = node.ends[-1] if node.ends else None
        if isinstance(newest, Response) and self._is_told_again(newest, context, sampled, session):
            return newest
        if session is not None:
            session = sys.intern(session)  # each request brings its own
        end = self._index.insert(sampled.tail.encode(), node)
        response = Response(
            context,
            sampled.ids,
            node,
            end=end,
            visible=sampled.visible,
            start=len(prompt),
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            session=session,
            finish_reason=sampled.finish_reason,
        )
        self._index.attach(response, node)
        if end is not node:
            self._index.attach(response, end)
        self._index.cover(response)
        self._starts.add(response)
        if session is not None:
            self._sessions.setdefault(session, []).append(response)
        self._add(response, _RESPONSE_BYTES)
        return response

    def _is_told_again(
        self, newest: Response, context: Context, sampled: Sampled, session: str | None
    ) -> bool:
        return (
            (newest.parent, newest.kept) == (context if context is not None else (None, 0))
            and newest.session == session
            and newest.ids == sampled.ids
            and newest.logprobs == sampled.logprobs
            and newest.versions == sampled.versions
            and newest.finish_reason == sampled.finish_reason
        )

    def _visible_end(self, context: Context, prompt: bytes, text: bytes) -> Node:
        before = context[0].node if context is not None else None
        if before is not None and before.depth == len(
            prompt
        ):  # and not at the visible end of a hidden tail, or a cut
            return self._index.insert(text, before)
        return self._index.insert(prompt + text)

    def _add(self, segment: Segment, overhead: int) -> None:
        if segment.parent is not None:
            segment.parent.children += 1
        self.segments += 1
        self.tokens += len(segment)
        self._payload_bytes += segment.size_bytes + overhead
        self._append(segment)

    def _append(self, segment: Segment) -> None:
        segment.generation = self._generation
        self._ages.append(segment)

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
        self._remember(text_of(segment.node))
        if isinstance(segment, Response):
            if segment.end is not segment.node:
                self._remember(text_of(segment.end))
            self._note_loss(segment)
        self._remove(segment)

    def _note_loss(self, response: Response) -> None:
        """What the session got before is a leaf from now on, but not where the session ended."""
        if response.session is None:
            return
        self._incomplete.add(response.session)
        before = said_before(response)
        if before is not None:
            before.continuation_lost = True

    def _remove(self, segment: Segment) -> None:
        self._ages.remove(segment)
        if isinstance(segment, Response):
            self._index.uncover(segment)
            self._starts.remove(segment)
            if segment.end is not segment.node:
                self._index.detach(segment, segment.end)
            self._leave_session(segment)
        self._index.detach(segment, segment.node)
        if segment.parent is not None:
            segment.parent.children -= 1
        self.segments -= 1
        self.tokens -= len(segment)
        overhead = _RESPONSE_BYTES if isinstance(segment, Response) else _PROMPT_BYTES
        self._payload_bytes -= segment.size_bytes + overhead

    def _leave_session(self, response: Response) -> None:
        if response.session is not None:
            remaining = self._sessions[response.session]
            remaining.remove(response)
            if not remaining:
                del self._sessions[response.session]
                self._incomplete.discard(response.session)

    def _remember(self, text: bytes) -> None:
        self._lost[hash(text)] = None
        if len(self._lost) > _LOST_TEXTS:
            self._lost.popitem(last=False)
