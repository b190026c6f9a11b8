"""Recorded segments of tokens, each with a pointer to what came before it.

A *context* is a pair ``(segment, length)``: the first ``length`` tokens of ``segment`` and, by parent
pointers, everything before them. A parent may be kept in part (a client cut a response), so cutting
copies nothing. Token ids and logprobs are packed bytes: Python objects per token would cost ten times more.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
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
    "pack_logprobs",
    "said_before",
]

#: Versions of consecutive runs of tokens: ``(version, number of tokens)``; None where the engine sent none.
Versions: TypeAlias = tuple[tuple[str | None, int], ...]
#: A segment and how many of its tokens belong to the context; ``None`` is the empty context.
Context: TypeAlias = "tuple[Segment, int] | None"

_ID_BYTES = 4
#: Sessions remembered as givers of one prompt; for any other session the tokenizer decides.
_GIVERS = 64


class Segment:
    """Tokens that entered a context in one step.

    ``kept``: how many tokens of ``parent`` precede it. ``ids``: packed int32. ``node``: the end of its visible text
    in the index. ``doubt``: why records with this segment are inexact, or None. Only a contradiction makes it no fact;
    then it is never continued. The other fields belong to the cache: ``children`` counts segments that continue it,
    ``pins`` contexts in flight; ``generation`` is that of its last use; ``older`` and ``newer`` are neighbours by age.
    """

    __slots__ = ("children", "doubt", "generation", "ids", "kept", "newer", "node", "older", "parent", "pins")

    def __init__(self, context: Context, ids: bytes, node: Node, doubt: str | None = None) -> None:
        self.parent: Segment | None = context[0] if context is not None else None
        self.kept = context[1] if context is not None else 0
        self.ids = ids
        self.node = node
        self.doubt = doubt
        self.children = 0
        self.pins = 0
        self.generation = 0
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
        """True unless only contradictory answers tell of it."""
        return self.doubt is None or self.doubt != CONTRADICTION


class Giver(NamedTuple):
    """The sessions that gave the tokens of a prompt as ids, as far as they are known; anonymous clients are not.

    ``is_odd``: the tokenizer spells their text in other tokens. None while nobody has asked it.
    """

    sessions: tuple[str, ...]
    is_odd: bool | None = None

    def with_another(self, sessions: tuple[str, ...]) -> Giver:
        """This giver with ``sessions`` added: they gave the same ids."""
        new = [one for one in sessions if one not in self.sessions]
        return (
            self._replace(sessions=(*self.sessions, *new)) if new and len(self.sessions) < _GIVERS else self
        )


class Prompt(Segment):
    """Tokens that the router made from text, or was given: loss mask 0, logprob 0.0.

    ``giver`` is None for tokens that the tokenizer makes of their text.
    """

    __slots__ = ("giver",)

    def __init__(
        self, context: Context, ids: bytes, node: Node, doubt: str | None = None, giver: Giver | None = None
    ) -> None:
        super().__init__(context, ids, node, doubt)
        self.giver = giver


class Response(Segment):
    """Tokens that an engine sampled: loss mask 1.

    ``logprobs``: packed float32 where that loses nothing, else float64; None when the engine sent none.
    ``visible``: tokens that the text shows, the hidden tail left out; -1 when the text ends inside a token.
    ``end``: where visible text plus decoded hidden tail lies in the index, ``node`` when there is no tail.
    ``start``: bytes of text before the response. ``before``: digest of the ids before it.
    ``version``: of all tokens, or runs of versions. ``finish_reason``: the engine's JSON value, as JSON.
    ``adapter``: name of the LoRA adapter that sampled it. ``continuation_lost``: the session went on from here, and
    what it got is lost.
    """

    __slots__ = (
        "adapter",
        "before",
        "continuation_lost",
        "end",
        "finish_reason",
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
        self.before = 0

    @property
    def versions(self) -> Versions:
        """Versions of consecutive runs of tokens."""
        return self.version if isinstance(self.version, tuple) else ((self.version, len(self)),)

    @property
    def reach(self) -> Node:
        """The node up to which a text may cut the response."""
        return self.node if self.visible >= 0 else self.end

    @property
    def size_bytes(self) -> int:
        """Bytes of the packed values, and of the session's name, which others of the same session share."""
        name = len(self.session) if self.session is not None else 0
        return len(self.ids) + (len(self.logprobs) if self.logprobs is not None else 0) + name

    @property
    def has_wide_logprobs(self) -> bool:
        """True when the logprobs are float64."""
        return self.logprobs is not None and len(self.logprobs) > len(self.ids)

    def logprob_array(self, length: int) -> npt.NDArray[np.floating[Any]]:
        """The first ``length`` logprobs; NaN where the engine sent none."""
        if self.logprobs is None:
            return np.full(length, np.nan)
        return np.frombuffer(self.logprobs, np.float64 if self.has_wide_logprobs else np.float32, length)

    def packed_logprobs(self, length: int, *, wide: bool) -> bytes:
        """The first ``length`` logprobs: float64 when ``wide``, else float32; NaN where none was sent."""
        if self.logprobs is None or wide != self.has_wide_logprobs:
            return self.logprob_array(length).astype(np.float64 if wide else np.float32).tobytes()
        return self.logprobs[: length * (8 if wide else 4)]


def pack_logprobs(values: Sequence[float | None]) -> bytes:
    """``values`` without loss: as float32 where all of them are exactly that, else as float64; None as NaN.

    Engines compute logprobs in float32, so half the bytes are the usual case; the comparison proves it.
    Raises TypeError when a value is no number.
    """
    exact = array("d", [math.nan if value is None else value for value in values])
    with np.errstate(over="ignore", invalid="ignore"):  # too large for float32: the comparison sees it
        narrow = np.frombuffer(exact).astype(np.float32)
    wide = exact.tobytes()
    return narrow.tobytes() if narrow.astype(np.float64).tobytes() == wide else wide


def links(context: Context) -> Iterator[tuple[Segment, int]]:
    """The segments of ``context`` from its end to its beginning, each with the number of tokens kept."""
    while context is not None:
        yield context
        segment = context[0]
        context = (segment.parent, segment.kept) if segment.parent is not None else None


def last_response(segment: Segment) -> Response | None:
    """``segment`` or the nearest response before it; None when the context is prompts only."""
    here: Segment | None = segment
    while here is not None and not isinstance(here, Response):
        here = here.parent
    return here


def last_sampled(context: Context) -> tuple[Response, int] | None:
    """The last response of ``context`` and how many tokens of it are kept; None when there are only prompts."""
    while context is not None:
        segment, length = context
        if isinstance(segment, Response):
            return segment, length
        context = (segment.parent, segment.kept) if segment.parent is not None else None
    return None


def doubt_of(context: Context) -> str | None:
    """The doubt in the earliest segment of ``context`` that has one. O(segments)."""
    found = None
    while context is not None:
        segment = context[0]
        found = segment.doubt or found
        context = (segment.parent, segment.kept) if segment.parent is not None else None
    return found


def said_before(response: Response) -> Response | None:
    """The nearest response of the same session before it; None when there is none."""
    before = last_response(response.parent) if response.parent is not None else None
    while before is not None and before.session != response.session:
        before = last_response(before.parent) if before.parent is not None else None
    return before


def context_ids(context: Context) -> bytes:
    """The token ids of ``context``, packed int32. O(tokens), a copy per segment."""
    parts = []
    while context is not None:  # links() would cost half as much again
        segment, length = context
        ids = segment.ids
        parts.append(ids if length * _ID_BYTES == len(ids) else ids[: length * _ID_BYTES])
        context = (segment.parent, segment.kept) if segment.parent is not None else None
    parts.reverse()
    return b"".join(parts)


def ids_before(segment: Segment) -> bytes:
    """The token ids of the context that ``segment`` continues, packed int32."""
    return context_ids((segment.parent, segment.kept) if segment.parent is not None else None)
