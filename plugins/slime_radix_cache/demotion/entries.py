"""Conversion of segments in memory to entries of the directory of demoted segments."""

from __future__ import annotations

from dataclasses import replace

from slime_radix_cache.demotion.directory import Entry, IdPlace, State
from slime_radix_cache.demotion.records import place_of
from slime_radix_cache.index.losses import packed_digests
from slime_radix_cache.index.segments import Prompt, Response, Segment
from slime_radix_cache.index.starts import id_before
from slime_radix_cache.index.text_index import text_of

__all__ = ["entry_of"]


def entry_of(segment: Segment, serial: int, parent: int, size: int, known: Entry | None) -> Entry:
    """Return the entry of ``segment``. Cost: O(its text), or O(1) if an earlier entry is ``known``.

    ``parent``: the parent's serial; ``size``: bytes of the segment's record.
    """
    state = _state_of(segment)
    if known is not None:  # only these fields may have changed
        return replace(known, parent=parent, state=state)
    text = text_of(segment.node)
    if not isinstance(segment, Response):
        place, marks = place_of(text, len(text)), packed_digests(text)
        return Entry(serial, parent, None, place, None, state, 0, (), size, marks)
    place, ids = place_of(text, segment.start), IdPlace(segment.before, id_before(segment))
    texts = [text] if segment.end is segment.node else [text, text_of(segment.end)]
    marks = packed_digests(*texts)
    return Entry(
        serial, parent, segment.session, place, ids, state, len(segment), segment.versions, size, marks
    )


def _state_of(segment: Segment) -> State:
    if isinstance(segment, Response):
        return State(segment.doubt, None, segment.continuation_lost, segment.is_decoded)
    assert isinstance(segment, Prompt)  # narrowing: a segment is a prompt or a response
    return State(segment.doubt, segment.giver)
