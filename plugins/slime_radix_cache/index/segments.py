"""Recorded segments of tokens, each with a pointer to the segment before it.

A *context* is a pair ``(segment, length)``: the first ``length`` tokens of ``segment`` and, by parent pointers,
everything before them. If a client keeps only a part of a response, the context has only the first tokens of the
response's segment, and nothing is copied. Token ids and logprobs are packed bytes; Python objects would need ten times
the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slime_radix_cache.index.prompt_segments import (
    ID_BYTES,
    Context,
    Giver,
    Prompt,
    Segment,
)
from slime_radix_cache.index.shared_fields import Versions, shared
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


class Response(Segment):
    """Tokens that an engine sampled. Their loss mask is 1 in most records: see ``retrieval.answer.record_of``.

    ``logprobs``: packed float32 if that loses nothing, else float64; None if the engine sent none.
    ``visible``: number of tokens before the *hidden tail*: the last tokens, whose text the client did not get, such as
    a stop token. It is -1 if the text ends inside a token.
    ``end``: the node at which the text plus the decoded hidden tail ends; ``node`` if there is no tail.
    ``start``: bytes of text before the response. ``before``: digest of the ids before it.
    ``finish_reason``: the engine's value, as JSON. ``adapter``: name of the LoRA adapter that sampled it.
    ``is_sound``: when the response was recorded, neither it nor a segment before it had a doubt, and neither it nor a
    response before it lacked a logprob.
    ``continuation_lost``: the session continued this response, and the next response is lost.
    ``is_decoded``: the text up to ``end`` is the decoding of all ids up to there, and later ids can be decoded
    separately. ``fields``: the values of those attributes that many responses have in common; see SharedFields.
    """

    __slots__ = ("before", "end", "fields", "session", "start")

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
        is_decoded: bool = False,
    ) -> None:
        super().__init__(context, ids + logprobs if logprobs else ids, node)
        self.end = end
        self.start = start
        self.session = session
        self.before = 0
        length = len(ids) // ID_BYTES
        self.fields = shared(
            ID_BYTES + (len(logprobs) // (length or 1) if logprobs is not None else 0),
            length - visible if visible >= 0 else -1,
            versions[0][0] if len(versions) == 1 else versions,
            finish_reason,
            doubt,
            adapter,
            doubt is None and _has_logprobs(ids, logprobs) and _is_sound(self.parent),
            is_decoded,
        )

    def __len__(self) -> int:
        return len(self.packed) // self.fields.width

    @property
    def ids(self) -> bytes:
        """See :attr:`Segment.ids`."""
        return self.packed[: ID_BYTES * len(self)]

    @property
    def doubt(self) -> str | None:
        """See :attr:`Segment.doubt`."""
        return self.fields.doubt

    @property
    def is_fact(self) -> bool:
        """See :attr:`Segment.is_fact`."""
        doubt = self.fields.doubt
        return doubt is None or doubt != CONTRADICTION

    @property
    def logprobs(self) -> bytes | None:
        """The packed logprobs, or None. O(tokens)."""
        width = self.fields.width
        return self.packed[ID_BYTES * len(self) :] if width > ID_BYTES else None

    @property
    def visible(self) -> int:
        """The number of tokens before the hidden tail; -1 if the text ends inside a token."""
        hidden = self.fields.hidden
        return len(self) - hidden if hidden >= 0 else -1

    @property
    def finish_reason(self) -> str:
        """See Response."""
        return self.fields.finish_reason

    @property
    def adapter(self) -> str | None:
        """See Response."""
        return self.fields.adapter

    @property
    def is_decoded(self) -> bool:
        """See Response."""
        return self.fields.is_decoded

    @property
    def is_sound(self) -> bool:
        """See Response."""
        return self.fields.is_sound

    @property
    def continuation_lost(self) -> bool:
        """See Response."""
        return self.fields.continuation_lost

    @continuation_lost.setter
    def continuation_lost(self, value: bool) -> None:
        self.fields = shared(*self.fields._replace(continuation_lost=value))

    @property
    def versions(self) -> Versions:
        """Versions of consecutive runs of tokens."""
        version = self.fields.version
        return version if isinstance(version, tuple) else ((version, len(self)),)

    @property
    def reach(self) -> Node:
        """The last node at which a text may cut the response."""
        return self.node if self.fields.hidden >= 0 else self.end

    @property
    def size_bytes(self) -> int:
        """Bytes of the packed values and of the session's name, although the session's responses share the name."""
        return len(self.packed) + (len(self.session) if self.session is not None else 0)

    @property
    def has_wide_logprobs(self) -> bool:
        """True when the logprobs are float64."""
        return self.fields.width > 2 * ID_BYTES

    def logprob_array(self, length: int) -> npt.NDArray[np.floating[Any]]:
        """Return the first ``length`` logprobs; NaN where the engine sent none."""
        if self.fields.width == ID_BYTES:
            return np.full(length, np.nan)
        kind = np.float64 if self.has_wide_logprobs else np.float32
        return np.frombuffer(self.packed, kind, length, ID_BYTES * len(self))

    def packed_logprobs(self, length: int, *, wide: bool) -> bytes:
        """Return the first ``length`` logprobs as float64 (``wide``) or float32; NaN where none was sent."""
        if self.fields.width == ID_BYTES or wide != self.has_wide_logprobs:
            return self.logprob_array(length).astype(np.float64 if wide else np.float32).tobytes()
        start = ID_BYTES * len(self)
        return self.packed[start : start + length * (8 if wide else 4)]


def _has_logprobs(ids: bytes, logprobs: bytes | None) -> bool:
    """Return True if each of ``ids`` has a logprob. O(tokens)."""
    if not ids or logprobs is None:
        return not ids
    kind = np.float64 if len(logprobs) > len(ids) else np.float32
    return not np.count_nonzero(np.isnan(np.frombuffer(logprobs, kind)))


def _is_sound(before: Segment | None) -> bool:
    """Return True if the context that ends with ``before`` is sound. O(segments since the last response)."""
    while isinstance(before, Prompt) and before.doubt is None:
        before = before.parent
    return before is None or (isinstance(before, Response) and before.is_sound)


def links(context: Context) -> Iterator[tuple[Segment, int]]:
    """Yield the segments of ``context`` from its end to its beginning, each with the number of tokens kept."""
    while context is not None:
        yield context
        segment = context[0]
        context = (segment.parent, segment.kept) if segment.parent is not None else None


def last_response(segment: Segment) -> Response | None:
    """Return ``segment`` if it is a response, else the nearest response before it; None if there are only prompts."""
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
    """Return the nearest response of the same session before ``response`` in its context, or None."""
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
        packed = segment.packed
        parts.append(packed if length * ID_BYTES == len(packed) else packed[: length * ID_BYTES])
        responses += type(segment) is Response
        if segment.parent is None:
            break
        length, segment = segment.kept, segment.parent
    parts.reverse()
    return b"".join(parts), responses


def ids_before(segment: Segment) -> bytes:
    """Return the token ids of the context that ``segment`` continues, packed int32."""
    return read_context((segment.parent, segment.kept) if segment.parent is not None else None)[0]
