"""Store of the recorded segments and of all indexes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from slime_radix_cache.index.ages import Ages
from slime_radix_cache.index.longer_records import LongerRecords
from slime_radix_cache.index.prompt_segments import confirm, new_prompt
from slime_radix_cache.index.segments import Context, Giver, Prompt, Response, Segment, Versions
from slime_radix_cache.index.sessions import Sessions
from slime_radix_cache.index.starts import Starts
from slime_radix_cache.index.text_index import TextIndex, nodes_of, prompt_end, text_of
from slime_radix_cache.index.text_node import Node

__all__ = ["Demotion", "Sampled", "SegmentStore"]

# Memory of an object of each kind in CPython 3.11, without packed values and text.
_NODE_BYTES = 120
_PROMPT_BYTES = 160
_RESPONSE_BYTES = 263
_SESSION_BYTES = 92


class Sampled(NamedTuple):
    """An engine's answer, ready to be recorded.

    ``ids`` and ``logprobs`` are packed (see Response). ``text``: what the client got. ``visible``: the number of first
    tokens that spell ``text``; -1 if ``text`` ends inside a token. ``tail``: the decoded text after ``text``; empty if
    it has incomplete characters. ``doubt``: why the record is not exact, or None. ``adapter``: the LoRA adapter of the
    answer, or None. ``is_decoded``: see Response.
    """

    ids: bytes
    logprobs: bytes | None
    text: str
    visible: int
    tail: str
    versions: Versions
    finish_reason: str
    doubt: str | None = None
    adapter: str | None = None
    is_decoded: bool = False


class Demotion(Protocol):
    """Moves segments out of memory to another store, instead of evicting them."""

    def added(self, segment: Segment) -> None:
        """Note that ``segment`` is new."""
        ...

    def removed(self, segment: Segment) -> None:
        """Note that ``segment`` is removed."""
        ...

    def is_continued(self, segment: Segment) -> bool:
        """Return True if a demoted segment continues ``segment``, or another router may have continued it."""
        ...

    def notice(self) -> None:
        """Note that a limit is exceeded."""
        ...


class SegmentStore:
    """All segments: ``_index`` by text, ``_starts`` by ids, ``_sessions`` by session, ``_ages`` by last use.

    A pinned segment is not in ``_ages``, and is not removed.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.segments = 0
        self._index = TextIndex()
        self._starts = Starts()
        self._ages = Ages()
        self._sessions = Sessions()
        self.longer: LongerRecords[Response] = LongerRecords(len)
        self._payload_bytes = 0
        self._generation = 0
        self.demotion: Demotion | None = None
        #: Called with each response that is removed.
        self.response_removed: Callable[[Response], None] = lambda response: None

    @property
    def size_bytes(self) -> int:
        """Estimated memory in use, text and bookkeeping included."""
        counts = self._index.nodes * _NODE_BYTES + len(self._sessions) * _SESSION_BYTES
        return self._payload_bytes + self._index.size_bytes + counts

    def pin(self, context: Context) -> None:
        """Protect ``context`` from eviction until :meth:`unpin`, which must follow once for each call."""
        segment = context[0] if context is not None else None
        unpinned: list[Segment] = []
        while segment is not None:
            if segment.generation >= 0:
                unpinned.append(segment)
                segment.generation = -1
            else:
                segment.generation -= 1
            segment = segment.parent
        self._ages.remove(unpinned)

    def unpin(self, context: Context) -> None:
        """Undo one :meth:`pin`; the context counts as used now."""
        segment = context[0] if context is not None else None
        unpinned: list[Segment] = []
        while segment is not None:
            segment.generation += 1
            if segment.generation == 0:
                unpinned.append(segment)
            segment = segment.parent
        self._append(unpinned)

    def restore_prompt(
        self, context: Context, ids: bytes, text: bytes, doubt: str | None, giver: Giver | None
    ) -> Prompt:
        """Add a prompt that was recorded before, or return an equal prompt that is there."""
        return self._prompt(context, ids, text, doubt, giver)

    def restore_response(
        self, context: Context, prompt: bytes, sampled: Sampled, session: str | None
    ) -> Response:
        """Add a response that was recorded before. ``prompt``: the text of its prompt, context included."""
        return self._response(context, self._prompt_end(context, prompt, None), sampled, session, None, None)

    def reorder(self, segments: Iterable[Segment], place: Callable[[Segment], int]) -> None:
        """Sort each list that has one of ``segments`` by ``place``, as if its items had been recorded in this order."""
        nodes: dict[Node, None] = {}
        for segment in segments:
            nodes[segment.node] = None
            if isinstance(segment, Response):
                nodes |= dict.fromkeys(nodes_of(segment))
                self._starts.sort(segment, place)
        for session in {one.session for one in segments if isinstance(one, Response)} - {None}:
            self._sessions.sort(str(session), place)
        for node in nodes:
            node.sort(place)

    def _prompt(
        self,
        context: Context,
        ids: bytes,
        text: bytes,
        doubt: str | None,
        giver: Giver | None,
        known: Node | None = None,
    ) -> Prompt:
        node = self._node_of(text, known)
        parent, kept = context if context is not None else (None, 0)
        for segment in node.ends:
            if (
                isinstance(segment, Prompt)
                and segment.packed == ids
                and (segment.parent, segment.kept) == (parent, kept)
            ):
                confirm(segment, doubt)
                if segment.giver is not None:  # None: the tokenizer makes these tokens of the text
                    segment.giver = segment.giver.with_another(giver.sessions) if giver is not None else None
                return segment
        prompt = new_prompt(context, ids, node, giver, doubt)
        self._index.attach(prompt, node)
        self._add(prompt, _PROMPT_BYTES)
        return prompt

    def _node_of(self, text: bytes, known: Node | None) -> Node:
        """Return the node at which ``text`` ends; ``known``: a node on the way to that node."""
        return (
            self._index.insert(text[known.depth :], known) if known is not None else self._index.insert(text)
        )

    def _prompt_end(self, context: Context, prompt: bytes, known: Node | None) -> Node:
        """Return the node where ``prompt`` ends. ``context`` has the whole prompt. ``known``: see :meth:`_node_of`."""
        before = context[0].node if context is not None else None
        if known is None and before is not None and before.depth == len(prompt) and text_of(before) == prompt:
            return before
        return self._node_of(prompt, known)  # the context is cut, has a hidden tail, or was found by its ids

    def _response(
        self,
        context: Context,
        begin: Node,
        sampled: Sampled,
        session: str | None,
        again: Response | None,
        part: Response | None,
    ) -> Response:
        """Add ``sampled``, or return ``again`` if it is the same response.

        ``begin``: the node at which the prompt ends. ``part``: the recorded beginning of the response.
        """
        node = self._index.insert(sampled.text.encode(), begin)
        if again is not None and again in node.ends and _is_all(again, context, sampled, session):
            return again
        if session is not None:
            session = self._sessions.name(session)  # one copy of the name for all responses saves memory
        end = self._index.insert(_utf8(sampled.tail), node)
        response = Response(
            context,
            sampled.ids,
            node,
            end=end,
            visible=sampled.visible,
            start=begin.depth,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            session=session,
            finish_reason=sampled.finish_reason,
            doubt=sampled.doubt,
            adapter=sampled.adapter,
            is_decoded=sampled.is_decoded,
        )
        self._index.attach(response, node)
        if end is not node:
            self._index.attach(response, end)
        self._index.begin(response, begin)
        self._index.cover(response)
        self._starts.add(response)
        if session is not None:
            self._sessions.add(session, response)
        if part is not None and part in part.node.ends and _is_beginning(part, response):
            self.longer.add(part, response)
        self._add(response, _RESPONSE_BYTES)
        return response

    def _add(self, segment: Segment, overhead: int) -> None:
        if segment.parent is not None:
            segment.parent.children += 1
        self.segments += 1
        self.tokens += len(segment)
        self._payload_bytes += segment.size_bytes + overhead
        self._append((segment,))
        if self.demotion is not None:
            self.demotion.added(segment)

    def _append(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.generation = self._generation
        self._ages.append(segments)

    def _remove(self, segment: Segment) -> None:
        if self.demotion is not None:
            self.demotion.removed(segment)
        self._ages.remove((segment,))
        self._sessions.unanswered.evicted(segment)
        if isinstance(segment, Response):
            self._remove_response(segment)
        else:
            self._index.detach(segment, segment.node)
        if segment.parent is not None:
            segment.parent.children -= 1
        self.segments -= 1
        self.tokens -= len(segment)
        overhead = _RESPONSE_BYTES if isinstance(segment, Response) else _PROMPT_BYTES
        self._payload_bytes -= segment.size_bytes + overhead

    def _remove_response(self, response: Response) -> None:
        begin = prompt_end(response)
        self._index.uncover(response)
        self._starts.remove(response)
        if response.end is not response.node:
            self._index.detach(response, response.end)
        self._index.detach(response, response.node)
        self._index.unbegin(response, begin)
        if response.session is not None:
            self._sessions.remove(response.session, response)
        self.longer.remove(response)
        self.response_removed(response)


@lru_cache(64)
def _utf8(tail: str) -> bytes:
    """Return ``tail`` in UTF-8. Most responses have the same tail, and so share its bytes."""
    return tail.encode()


def _is_beginning(part: Response, response: Response) -> bool:
    """Return True if the tokens of ``part`` are the first of ``response``, in the same context."""
    return (
        (part.parent, part.kept) == (response.parent, response.kept)
        and part.session == response.session
        and response.ids.startswith(part.ids)
    )


def _is_all(known: Response, context: Context, sampled: Sampled, session: str | None) -> bool:
    """Return True if ``known`` is the same response as ``sampled``."""
    return (
        (known.parent, known.kept) == (context if context is not None else (None, 0))
        and known.session == session
        and known.ids == sampled.ids
        and known.logprobs == sampled.logprobs
        and known.versions == sampled.versions
        and known.finish_reason == sampled.finish_reason
        and (known.doubt, known.adapter) == (sampled.doubt, sampled.adapter)
    )
