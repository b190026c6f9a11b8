"""Conversion of segments to log records, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Prompt, Response, Segment
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.journal.log_records import Answered, Asked

__all__ = ["sampled_from", "segment_record", "text_from"]


def segment_record(
    segment: Segment, serials: Mapping[Segment, int], parts: tuple[int, ...] = ()
) -> Asked | Answered:
    """Return the record of ``segment``. ``serials`` has ``segment`` and its parent. ``parts``: see Answered."""
    parent = segment.parent
    place = serials[parent] if parent is not None else 0
    fork = _fork(_end(parent), segment.node) if parent is not None else None
    shared = fork.depth if fork is not None else 0
    text = text_of(segment.node, fork)
    if isinstance(segment, Prompt):
        giver = segment.giver.sessions if segment.giver is not None else None
        return Asked(serials[segment], place, segment.kept, shared, text, segment.ids, giver, segment.doubt)
    assert isinstance(segment, Response)  # narrowing: a segment is a prompt or a response
    return Answered(
        serials[segment],
        place,
        segment.kept,
        shared,
        text,
        segment.start,
        segment.ids,
        segment.logprobs,
        segment.visible,
        text_of(segment.end, segment.node).decode(),
        segment.versions,
        segment.finish_reason,
        segment.session,
        segment.doubt,
        segment.adapter,
        parts,
    )


def text_from(record: Asked | Answered, parent: Segment | None) -> bytes:
    """Return the whole text of ``record``. ``parent``: the segment that the record continues, or None."""
    return text_of(_end(parent))[: record.shared] + record.text if parent is not None else record.text


def sampled_from(record: Answered, text: bytes) -> Sampled:
    """Return the answer in ``record``, whose whole text is ``text``."""
    return Sampled(
        record.ids,
        record.logprobs,
        text[record.start :].decode(),
        record.visible,
        record.tail,
        tuple((sys.intern(name) if name is not None else None, count) for name, count in record.versions),
        sys.intern(record.finish_reason),
        record.doubt,
        record.adapter,
    )


def _end(segment: Segment) -> Node:
    """Return the node at which the text of ``segment`` ends, hidden tokens included."""
    return segment.end if isinstance(segment, Response) else segment.node


def _fork(one: Node, other: Node) -> Node:
    """Return the node at which the texts of two nodes diverge. O(edges after it)."""
    while one is not other:
        deeper = one if one.depth >= other.depth else other
        assert deeper.parent is not None  # not the root, which is never the deeper node
        if deeper is one:
            one = deeper.parent
        else:
            other = deeper.parent
    return one
