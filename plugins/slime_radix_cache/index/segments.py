"""Recorded segments of tokens, each with a pointer to the segment before it.

A *context* is a pair ``(segment, length)``: the first ``length`` tokens of ``segment`` and, by parent
pointers, everything before them. A context may keep only a part of a parent (a client cut a response),
so cutting copies nothing. Token ids and logprobs are packed bytes; Python objects would need ten times the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_sglang.evidence import CONTRADICTION

if TYPE_CHECKING:
    from slime_radix_cache.index.text_node import Node

__all__ = [
    "Context",
    "Giver",
    "Prompt",
    "Response",
    "Segment",
    "Versions",
    "context_ids",
    "doubt_of",
    "ids_before",
    "last_response",
    "last_sampled",
    "links",
    "prior_response",
    "read_context",
]

#: ``(version, number of tokens)`` of consecutive runs of tokens; the version is None where the engine sent none.
Versions: TypeAlias = tuple[tuple[str | None, int], ...]
#: A segment and how many of its tokens belong to the context; ``None`` is the empty context.
Context: TypeAlias = "tuple[Segment, int] | None"

_ID_BYTES = 4
#: Sessions remembered as givers of one prompt. For any other session the ids count as another client's.
_GIVERS = 64


class Segment:
    """Tokens that entered a context in one step.

    ``kept``: how many tokens of ``parent`` precede it. ``ids``: packed int32. ``node``: the end of its visible text
    in the index. ``doubt``: why records with this segment are inexact, or None. The other fields belong to the cache:
    ``children`` counts segments that continue it, ``pins`` counts pinned contexts that have it. ``generation`` is the
    number of new weight versions before its last use; ``older`` and ``newer`` are neighbours by age. ``serial``: its
    number, which it keeps when it is demoted; 0 without a store.
    """

    __slots__ = (
        "children", "doubt", "generation", "ids", "kept", "newer", "node", "older", "parent", "pins", "serial",
    )  # fmt: skip

    def __init__(self, context: Context, ids: bytes, node: Node, doubt: str | None = None) -> None:
        self.parent: Segment | None = context[0] if context is not None else None
        self.kept = context[1] if context is not None else 0
        self.ids = ids
        self.node = node
        self.doubt = doubt
        self.children = self.pins = self.generation = self.serial = 0
        self.older: Segment | None = None
        self.newer: Segment | None = None

    def __len__(self) -> int:
        return len(self.ids) // _ID_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the packed values."""
        return len(self.ids)

    @property
    def is_fact(self) -> bool:
        """False if the segment is known only from contradictory answers; then nothing continues it."""
        return self.doubt is None or self.doubt != CONTRADICTION


class Giver(NamedTuple):
    """The sessions that gave the tokens of a prompt as ids. A request without a session adds no session.

    ``is_odd``: True if the tokenizer makes other tokens of the text; None until this is checked.
    """

    sessions: tuple[str, ...]
    is_odd: bool | None = None

    def with_another(self, sessions: tuple[str, ...]) -> Giver:
        """Return this giver with ``sessions`` added, which gave the same ids."""
        new = [one for one in sessions if one not in self.sessions]
        return (
            self._replace(sessions=(*self.sessions, *new)) if new and len(self.sessions) < _GIVERS else self
        )


class Prompt(Segment):
    """Tokens that the router made from text, or got from a client: loss mask 0, logprob 0.0.

    ``giver`` is None if the router made these tokens from text.
    """

    __slots__ = ("giver",)

    def __init__(
        self, context: Context, ids: bytes, node: Node, doubt: str | None = None, giver: Giver | None = None
    ) -> None:
        super().__init__(context, ids, node, doubt)
        self.giver = giver


class Response(Segment):
    """Tokens that an engine sampled: loss mask 1.

    ``logprobs``: packed float32 if that loses nothing, else float64; None if the engine sent none.
    ``visible``: number of tokens before the hidden tail; -1 if the text ends inside a token.
    ``end``: the node at which the text plus the decoded hidden tail ends; ``node`` if there is no tail.
    ``start``: bytes of text before the response. ``before``: digest of the ids before it.
    ``version``: the version of all tokens, or runs of versions. ``finish_reason``: the engine's value, as JSON.
    ``is_sound``: when this was recorded, no segment up to here had a doubt, and no response up to here lacked a
    logprob. ``adapter``: name of the LoRA adapter that sampled it.
    ``continuation_lost``: the session continued this response, and the next response is lost. ``is_decoded``: the text
    up to ``end`` is the decoding of all ids up to there, and the ids after it can be decoded separately.
    """

    __slots__ = (
        "adapter",
        "before",
        "continuation_lost",
        "end",
        "finish_reason",
        "is_decoded",
        "is_sound",
        "logprobs",
        "session",
        "start",
        "version",
        "visible",
    )

    def __init__(
        self,
        context: Context,
        ids: bytes,
        node: Node,
        *,
        end: Node,
        visible: int,
        start: int,
        logprobs: bytes | None,
        versions: Versions,
        session: str | None,
        finish_reason: str,
        doubt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        super().__init__(context, ids, node, doubt)
        self.end = end
        self.visible = visible
        self.start = start
        self.logprobs = logprobs
        self.version = versions[0][0] if len(versions) == 1 else versions
        self.session = session
        self.finish_reason = finish_reason
        self.adapter = adapter
        self.continuation_lost = False
        self.is_decoded = False
        self.before = 0
        self.is_sound = self._is_sound()

    def _is_sound(self) -> bool:
        """Return ``is_sound``. O(tokens of this response, and segments since the previous one)."""
        if self.doubt is not None or np.count_nonzero(np.isnan(self.logprob_array(len(self)))):
            return False
        before = self.parent
        while isinstance(before, Prompt) and before.doubt is None:
            before = before.parent
        return before is None or (isinstance(before, Response) and before.is_sound)

    @property
    def versions(self) -> Versions:
        """Versions of consecutive runs of tokens."""
        return self.version if isinstance(self.version, tuple) else ((self.version, len(self)),)

    @property
    def reach(self) -> Node:
        """The last node at which a text may cut the response."""
        return self.node if self.visible >= 0 else self.end

    @property
    def size_bytes(self) -> int:
        """Bytes of the packed values, and of the session's name (shared by its responses)."""
        name = len(self.session) if self.session is not None else 0
        return len(self.ids) + (len(self.logprobs) if self.logprobs is not None else 0) + name

    @property
    def has_wide_logprobs(self) -> bool:
        """True when the logprobs are float64."""
        return self.logprobs is not None and len(self.logprobs) > len(self.ids)

    def logprob_array(self, length: int) -> npt.NDArray[np.floating[Any]]:
        """Return the first ``length`` logprobs; NaN where the engine sent none."""
        if self.logprobs is None:
            return np.full(length, np.nan)
        return np.frombuffer(self.logprobs, np.float64 if self.has_wide_logprobs else np.float32, length)

    def packed_logprobs(self, length: int, *, wide: bool) -> bytes:
        """Return the first ``length`` logprobs as float64 (``wide``) or float32; NaN where none was sent."""
        if self.logprobs is None or wide != self.has_wide_logprobs:
            return self.logprob_array(length).astype(np.float64 if wide else np.float32).tobytes()
        return self.logprobs[: length * (8 if wide else 4)]


def links(context: Context) -> Iterator[tuple[Segment, int]]:
    """Yield the segments of ``context`` from its end to its beginning, each with the number of tokens kept."""
    while context is not None:
        yield context
        segment = context[0]
        context = (segment.parent, segment.kept) if segment.parent is not None else None


def last_response(segment: Segment) -> Response | None:
    """Return ``segment`` or the nearest response before it; None if there are only prompts."""
    here: Segment | None = segment
    while here is not None and not isinstance(here, Response):
        here = here.parent
    return here


def last_sampled(context: Context) -> tuple[Response, int] | None:
    """Return the last response of ``context`` and how many tokens of it are kept; None if there are only prompts."""
    while context is not None:
        segment, length = context
        if isinstance(segment, Response):
            return segment, length
        context = (segment.parent, segment.kept) if segment.parent is not None else None
    return None


def doubt_of(context: Context) -> str | None:
    """Return the doubt of the earliest segment of ``context`` that has one. O(segments)."""
    found = None
    while context is not None:
        segment = context[0]
        found = segment.doubt or found
        context = (segment.parent, segment.kept) if segment.parent is not None else None
    return found


def prior_response(response: Response) -> Response | None:
    """Return the nearest response before ``response`` of the same session, or None."""
    before = last_response(response.parent) if response.parent is not None else None
    while before is not None and before.session != response.session:
        before = last_response(before.parent) if before.parent is not None else None
    return before


def context_ids(context: Context) -> bytes:
    """Return the token ids of ``context``, packed int32. O(tokens)."""
    return read_context(context)[0]


def read_context(context: Context) -> tuple[bytes, int]:
    """Return the token ids of ``context``, packed int32, and the number of its responses. O(tokens)."""
    if context is None:
        return b"", 0
    parts: list[bytes] = []
    responses = 0
    segment, length = context
    while True:  # inlined: links() would take 1.5 times as long
        ids = segment.ids
        parts.append(ids if length * _ID_BYTES == len(ids) else ids[: length * _ID_BYTES])
        responses += type(segment) is Response
        if segment.parent is None:
            break
        length, segment = segment.kept, segment.parent
    parts.reverse()
    return b"".join(parts), responses


def ids_before(segment: Segment) -> bytes:
    """Return the token ids of the context that ``segment`` continues, packed int32."""
    return context_ids((segment.parent, segment.kept) if segment.parent is not None else None)
