"""Readings of a stream's events, for a plugin that reads the same stream behind the recorder."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_cache.capture.streamed import FORMATS, Recorded, event, events, is_doubted, written
from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from slime_sglang.event_readers import Reading, reader_of, tap_events
from slime_sglang.events import EventSplitter, data_in

IDS = list(range(300, 308))
#: Formats whose events are all parsed.
PARSED = ("spaces", "clock", "sorted")


def framed(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def readings_of(recorded: Recorded, *pieces: bytes) -> list[Reading]:
    """Pass ``pieces`` to the recorder; return the readings of all events, as a reader behind it gets them."""
    splitter, found = EventSplitter(), []
    for piece in pieces:
        ahead = recorded.stream.growth(piece)
        recorded.stream.feed(piece)
        told = [recorded.stream.reading(number, data) for number, data in enumerate(splitter.feed(piece))]
        assert ahead is None or told == [ahead]
        found += told
    return found


def text_in(readings: list[Reading], index: int = 0) -> str:
    """Return the text of a sequence whose client needs only the new text of each event."""
    text = ""
    for reading in readings:
        if isinstance(reading, tuple):
            text += reading[1] if reading[0] == index else ""
        elif reading is not None and reading.get("index", 0) == index:
            text = reading["text"]
    return text


@given(st.lists(st.text('ab"\\\n\t😀é\x00"finish_reason":null', max_size=5), min_size=3, max_size=9))
def test_new_text_is_right_for_any_text(pieces: list[str]) -> None:
    told = [event(IDS[:1] * end) for end in range(1, len(pieces) + 1)]
    for end, one in enumerate(told, 1):
        one["text"] = "".join(pieces[:end])
    readings = readings_of(Recorded(), *map(framed, written(told)))
    assert readings[:2] == told[:2]
    assert readings[2:] == [(0, piece) for piece in pieces[2:]]


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("cut", [None, 1, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_each_event_is_read_once_however_it_comes(name: str, cut: int | None, together: int) -> None:
    told = events(name)
    data = [framed(one) for one in written(told, name)]
    pieces = [b"".join(data[start : start + together]) for start in range(0, len(data), together)]
    pieces = [part for piece in pieces for part in (piece[:cut], piece[cut or len(piece) :]) if part]
    recorded = Recorded()
    readings = readings_of(recorded, *pieces)
    assert len(readings) == len(told)
    assert None not in readings
    assert (readings[0], readings[-1]) == (told[0], told[-1])
    assert any(isinstance(one, tuple) for one in readings) == (name not in PARSED)
    assert text_in(readings[:-1]) == told[-2]["text"]
    assert not is_doubted(recorded)


def test_sequences_have_their_own_new_texts() -> None:
    told = [one | {"index": index} for one in events() for index in range(3)]
    readings = readings_of(Recorded(), *map(framed, written(told)))
    for index in range(3):
        assert text_in(readings, index) == told[-1]["text"]
    assert readings[6:9] == [(index, told[6]["text"][len(told[3]["text"]) :]) for index in range(3)]


def test_growth_is_no_part_of_the_record_until_its_event_is_passed_on() -> None:
    recorded = Recorded()
    data = [framed(one) for one in written(events())]
    for piece in data[:4]:
        recorded.stream.feed(piece)
    assert recorded.stream.growth(data[4]) is not None
    recorded.stream.record_all()
    assert len(recorded.answers[-1]["output_ids"]) == 4
    recorded.stream.feed(data[4])
    recorded.stream.record_all()
    assert len(recorded.answers[-1]["output_ids"]) == 5


def test_event_that_was_seen_before_it_came_with_the_next_is_read_again() -> None:
    recorded = Recorded()
    told = events()
    data = [framed(one) for one in written(told)]
    for piece in data[:4]:
        recorded.stream.feed(piece)
    growth = recorded.stream.growth(data[4])  # then the client could not take the piece
    both = data[4] + data[5]
    assert recorded.stream.growth(both) is None
    recorded.stream.feed(both)
    new = told[5]["text"][len(told[4]["text"]) :]
    assert [recorded.stream.reading(place, data[4 + place][6:-2]) for place in (0, 1)] == [growth, (0, new)]


def test_same_piece_a_second_time_adds_no_text() -> None:
    recorded = Recorded()
    data = [framed(one) for one in written(events())]
    readings = readings_of(recorded, *data[:5], data[4])
    assert readings[5] == (0, "")


def test_reading_belongs_to_the_bytes_that_were_read() -> None:
    recorded = Recorded()
    one, other = ([framed(each) for each in written(events())] for _ in range(2))
    changed = [piece.replace(b'"id":"r"', b'"id":"s"') for piece in other]
    for mine, theirs in zip(one, changed, strict=True):
        recorded.stream.feed(mine)
        assert recorded.stream.reading(0, theirs[6:-2]) is None
        assert recorded.stream.reading(0, mine[6:-2]) is not None
        assert recorded.stream.reading(1, mine[6:-2]) in (None, recorded.stream.reading(0, mine[6:-2]))
    recorded.stream.feed(one[0] + one[1])
    assert recorded.stream.reading(1, one[0][6:-2]) is None
    assert recorded.stream.reading(2, one[0][6:-2]) is None


def test_event_behind_one_that_was_not_understood_is_read_as_a_whole() -> None:
    """The other reader may have understood the event, or not: it cannot tell which text is new."""
    told = events()
    data = written(told)
    recorded = Recorded()
    readings = readings_of(recorded, *map(framed, [*data[:4], b'{"text":"?","meta_info":5}', *data[4:]]))
    assert len(recorded.errors) == 1
    assert isinstance(readings[3], tuple)
    assert readings[4] is None
    assert readings[5] == told[4]
    assert isinstance(readings[6], tuple)


def test_events_without_tokens_are_read_too() -> None:
    error = {"error": {"message": "out of memory"}}
    pieces = framed(orjson.dumps(error)), framed(b"[DONE]")
    assert readings_of(Recorded(), *pieces) == [error, None]


def test_event_whose_arrays_may_be_cut_out_is_left_to_its_reader() -> None:
    large: dict[str, Any] = event(IDS)
    large["meta_info"]["routed_experts"] = "A" * (1 << 16)
    assert readings_of(Recorded(), framed(orjson.dumps(large))) == [None]


def test_data_of_an_event_is_not_copied() -> None:
    piece = framed(b"{}")
    assert data_in(piece).obj is piece
    assert bytes(data_in(piece)) == b"{}"


class Reader:
    """A tap that has read nothing."""

    def feed(self, chunk: bytes) -> None: ...

    def close(self, complete: bool) -> None: ...

    def growth(self, piece: bytes) -> None: ...

    def reading(self, number: int, data: bytes) -> None: ...


def test_reader_is_found_only_by_the_reply_that_it_taps() -> None:
    reader, reply = Reader(), Reply(200, [])
    exchange = Exchange(Request("POST", b"/generate", []), session=None)
    assert reader_of(exchange, reply) is None
    tap_events(exchange, reply, reader)
    assert reader_of(exchange, reply) is reader
    assert reader_of(exchange, Reply(200, [])) is None
    exchange.close()
    assert reader_of(exchange, reply) is None
