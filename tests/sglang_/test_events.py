"""Server-sent events: their ends, and the numbers of sequences in them."""

from __future__ import annotations

import pytest

from slime_sglang.events import EventCutter, EventSplitter, events_in, last_end, sequence_of


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b'{"text":"a","index":3}', 3),
        (b'data: {"text":"a","index":12}\n\n', 12),
        (b'{"text":"a"}', None),
        (b'{"text":"a","index":3', None),
        (b'{"text":"a","index":3}}', None),
        (b'{"text":"a","x":{"b":1,"index":3}}', None),
        (b'{"text":"a,\\"index\\":3}"}', None),
        (b'{"text":"a","index":3,"x":0}', None),
        (b'{"index":3,"text":"a"}', None),
        (b'{"text":"a","index":-3}', None),
        (b'{"text":"a","index":3.0}', None),
        (b'{"text":"a","index":"3"}', None),
        (b'{"text":"a","index":true}', None),
        (b'{"text":"a","index":%b}' % (b"3" * 40), None),
        (b"", None),
    ],
)
def test_number_of_a_sequence_is_read_at_the_end_of_an_event(data: bytes, number: int | None) -> None:
    assert sequence_of(data) == number


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
        assert (cutter.is_torn, splitter.is_torn) == (is_torn, is_torn)
