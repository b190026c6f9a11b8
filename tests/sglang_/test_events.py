"""Ends of server-sent events."""

from __future__ import annotations

import pytest

from slime_sglang.events import EventCutter, EventSplitter, events_in, last_end


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\n\n", b"\n\r\n"])
def test_event_may_end_in_any_kind_of_empty_line(end: bytes) -> None:
    data = b"data: a" + end
    assert events_in(data + b"data: b\n") == [b"a"]
    assert last_end(data + b"data: b\n") == last_end(data) == len(data)
    assert last_end(data[:-1]) == 0


def test_empty_lines_and_other_fields_are_no_events() -> None:
    assert events_in(b"\n\n\nid: 1\n\n: x\n\ndata: a\nevent: e\ndata:b\n\n\n\n") == [b"a\nb"]


def test_event_is_torn_until_it_ends() -> None:
    cutter, splitter = EventCutter(), EventSplitter()
    for piece, is_torn in ((b"data: a\n", True), (b"\nda", True), (b"ta: b\r\n\r", True), (b"\n", False)):
        cutter.feed(piece)
        splitter.feed(piece)
        assert cutter.is_torn == is_torn
        assert splitter.only_event(b"data: c\n\n") == (None if is_torn else b"c")
