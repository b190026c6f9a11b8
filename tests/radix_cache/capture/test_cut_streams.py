"""A cumulative stream is recorded alike wherever its bytes are cut, and however many events come together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import orjson
import pytest

from radix_cache.capture.streamed import Recorded
from slime_sglang import contradiction

_TEXT = 'a"b\\çd]'


def _events() -> list[dict[str, Any]]:
    """Return a stream with a token for each character, and a last event."""
    return [_event(count, is_last=False) for count in range(1, len(_TEXT))] + [
        _event(len(_TEXT), is_last=True)
    ]


def _event(count: int, *, is_last: bool) -> dict[str, Any]:
    ids = list(range(1, count + 1))
    meta = {
        "id": "one",
        "finish_reason": {"type": "length"} if is_last else None,
        "output_token_logprobs": [[-one / 7, one, None] for one in ids],
        "completion_tokens": count,
    }
    return {"text": _TEXT[:count], "output_ids": ids, "meta_info": meta}


def _bytes(events: Iterable[dict[str, Any]], end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: %s%s" % (orjson.dumps(event), end) for event in events)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\n\n"])
def test_stream_is_recorded_alike_wherever_it_is_cut(end: bytes) -> None:
    events = _events()
    data = _bytes(events, end)
    for cut in range(1, len(data)):
        recorded = Recorded()
        recorded.stream.feed(data[:cut])
        recorded.stream.feed(data[cut:])
        assert (recorded.answers, recorded.took_back, recorded.errors) == ([events[-1]], False, []), cut


@pytest.mark.parametrize("together", [1, 2, 3, 7])
def test_stream_is_recorded_alike_however_many_events_come_together(together: int) -> None:
    events = _events()
    recorded = Recorded()
    for start in range(0, len(events), together):
        assert recorded.answers == []
        recorded.stream.feed(_bytes(events[start : start + together]))
    assert (recorded.answers, recorded.took_back, recorded.errors) == ([events[-1]], False, [])


@pytest.mark.parametrize("together", [1, 2, 3, 7])
@pytest.mark.parametrize("place", range(1, 6))
@pytest.mark.parametrize(
    "change",
    [
        lambda event: event.update(text="X" + event["text"][1:]),
        lambda event: event["output_ids"].__setitem__(0, 11),
        lambda event: event["output_ids"].__setitem__(0, 9),
        lambda event: event["output_ids"].__setitem__(-2, event["output_ids"][-2] * 10),
        lambda event: event["meta_info"]["output_token_logprobs"].__setitem__(0, [-7.0, 1, None]),
    ],
    ids=["text", "longer id", "id", "longer last id", "logprob"],
)
def test_change_in_any_event_is_seen(
    change: Callable[[dict[str, Any]], None], place: int, together: int
) -> None:
    """Only one event differs: the last event, from which the answer is recorded, repeats the events before it."""
    events = _events()
    change(events[place])
    recorded = Recorded()
    for start in range(0, len(events), together):
        recorded.stream.feed(_bytes(events[start : start + together]))
    told = contradiction(recorded.answers[-1], prompt_tokens=None, rid=None)
    assert recorded.took_back or told is not None  # ids of the second event may be taken for new ones


@pytest.mark.parametrize("together", [1, 2, 3])
def test_answer_so_far_has_all_events_that_came(together: int) -> None:
    events = _events()[:-1]
    recorded = Recorded()
    for start in range(0, len(events), together):
        recorded.stream.feed(_bytes(events[start : start + together]))
        so_far = recorded.stream.so_far()
        last = events[start + together - 1 :][:1] or events[-1:]
        assert (so_far.text, so_far.ids) == (last[0]["text"], last[0]["output_ids"])
    recorded.stream.record_all()
    assert (recorded.answers, recorded.took_back) == (events[-1:], False)


def test_event_that_is_not_understood_leaves_the_answer_so_far() -> None:
    events = _events()[:4]
    recorded = Recorded()
    for event in events:
        recorded.stream.feed(_bytes([event]))
    recorded.stream.feed(b"data: {\n\n")
    recorded.stream.record_all()
    assert (recorded.answers, len(recorded.errors)) == (events[-1:], 1)


def test_line_break_in_an_event_is_no_part_of_its_data() -> None:
    """Events of several lines have their data joined."""
    events = _events()
    recorded = Recorded()
    for event in events:
        recorded.stream.feed(_bytes([event]).replace(b',"output_ids"', b'\ndata: ,"output_ids"'))
    assert (recorded.answers, recorded.took_back, recorded.errors) == (events[-1:], False, [])


@pytest.mark.parametrize(
    "before",
    [b'],"meta_info":', b"[-", b',null]],"', b']],"completion', b'"completion', b"}}", b'"output_ids":'],
)
@pytest.mark.parametrize("place", range(1, 6))
def test_empty_line_between_values_ends_an_event(place: int, before: bytes) -> None:
    """To a JSON parser, line breaks between values are white space."""
    data = [_bytes([event]) for event in _events()]
    start, found, rest = data[place].rpartition(before)
    assert found
    data[place] = start + b"\n\n" + found + rest
    recorded = Recorded()
    for one in data:
        recorded.stream.feed(one)
    assert len(recorded.errors) == 1


@pytest.mark.parametrize("torn", [b"data: {", b": comment", b"da"])
def test_whole_event_behind_a_torn_event_is_a_part_of_it(torn: bytes) -> None:
    *events, last = _events()
    recorded = Recorded()
    for event in events[:4]:
        recorded.stream.feed(_bytes([event]))
    recorded.stream.feed(torn)
    recorded.stream.feed(_bytes(events[4:5]))
    so_far = recorded.stream.so_far()
    recorded.stream.feed(_bytes([last]))
    # Behind a colon or in an unknown field, the event is no data.
    assert (so_far.text, len(recorded.errors)) == (_TEXT[:4], int(torn.startswith(b"data: ")))


@pytest.mark.parametrize("line", [b"dada: ", b"Data: ", b":ata: "])
def test_line_of_another_field_is_no_event(line: bytes) -> None:
    *events, last = _events()
    recorded = Recorded()
    for event in events[:4]:
        recorded.stream.feed(_bytes([event]))
    recorded.stream.feed(_bytes(events[4:5]).replace(b"data: ", line))
    so_far = recorded.stream.so_far()
    recorded.stream.feed(_bytes([last]))
    assert (so_far.text, recorded.answers, recorded.errors) == (_TEXT[:4], [last], [])


@pytest.mark.parametrize("end", [b"\nd", b"\r\n", b"\n\r", b"\n:"])
def test_event_without_an_empty_line_behind_it_has_not_ended(end: bytes) -> None:
    events = _events()
    recorded = Recorded()
    for event in events[:4]:
        recorded.stream.feed(_bytes([event]))
    recorded.stream.feed(_bytes(events[4:5], end))
    assert recorded.stream.so_far().text == _TEXT[:4]


def test_broken_stream_is_recorded_with_its_last_event() -> None:
    events = _events()[:5]
    recorded = Recorded()
    for event in events:
        recorded.stream.feed(_bytes([event]))
    recorded.stream.record_all()
    assert (recorded.answers, recorded.took_back) == (events[-1:], False)


def test_later_event_of_another_sequence_is_recorded_for_itself() -> None:
    events = _events()[:6]
    events[4] |= {"index": 1}
    recorded = Recorded()
    for event in events:
        recorded.stream.feed(_bytes([event]))
    assert recorded.stream.has_begun(1)


def test_second_finish_reason_ends_the_stream() -> None:
    """JSON parsers take the last one of two equal keys."""
    events = _events()
    recorded = Recorded()
    for event in events[:5]:
        recorded.stream.feed(_bytes([event]))
    last = _bytes(events[5:6])
    recorded.stream.feed(last.replace(b"}}\n", b',"finish_reason":{}}}\n'))
    assert len(recorded.answers) == 1
