"""Server-sent events, whichever way they are cut and whatever an engine puts into them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_radix_cache.capture.streams import GenerationStream
from slime_sglang import contradiction
from slime_sglang.events import EventSplitter

DATA = b': comment\n\ndata: {"a":1}\n\nevent: x\ndata: one\ndata:two\r\n\r\ndata: \r\r\n\r\ndata: [DONE]\n\n'


@given(st.sets(st.integers(1, len(DATA) - 1)))
def test_events_are_the_same_wherever_the_bytes_are_torn(cuts: set[int]) -> None:
    splitter = EventSplitter()
    edges = [0, *sorted(cuts), len(DATA)]
    found = [data for start, end in pairwise(edges) for data in splitter.feed(DATA[start:end])]
    assert found == [b'{"a":1}', b"one\ntwo", b"\r", b"[DONE]"]


class CapturedStream:
    """A stream, and what it recorded."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.errors: list[Exception] = []
        self.took_back = False
        self.stream = GenerationStream(self._record, self.errors.append)

    def _record(self, index: int, answer: Any, took_back: bool) -> None:
        self.answers.append((index, answer))
        self.took_back = took_back

    def send(self, **event: Any) -> None:
        self.stream.feed(b"data: %s\n\n" % orjson.dumps(event))


def event(text: str, ids: list[int], count: int, *, last: bool = False, **more: Any) -> dict[str, Any]:
    logprobs = [[-one / 7, one, None] for one in ids]
    meta = {"finish_reason": {"type": "stop"} if last else None, "completion_tokens": count}
    return {"text": text, "output_ids": ids, "meta_info": meta | {"output_token_logprobs": logprobs}} | more


def cumulative(text: str) -> list[dict[str, Any]]:
    """The events of ``text``, a token for each character, without the last one."""
    return [event(text[:count], list(range(1, count + 1)), count) for count in range(1, len(text) + 1)]


@pytest.mark.parametrize("index", [{}, {"index": 0}], ids=["single", "batch"])
@pytest.mark.parametrize(
    "events",
    [
        [
            event("a", [1], 1),
            event("ab", [1, 2], 2),
            event("abc", [1, 2, 3], 3),
            event("abcd", [1, 2, 3, 4], 4, last=True),
        ],
        [event("a", [1], 1), event("bc", [2, 3], 3), event("", [], 3), event("d", [4], 4, last=True)],
        [event("", [], 0), event("ab", [1, 2], 2), event("cd", [3, 4], 4), event("", [], 4, last=True)],
        [event("abcd", [1, 2, 3, 4], 4, last=True)],
    ],
    ids=["cumulative", "deltas", "deltas with empty ones", "one event"],
)
def test_a_stream_ends_as_the_unstreamed_answer(events: list[dict[str, Any]], index: dict[str, int]) -> None:
    recorded = CapturedStream()
    for one in events:
        assert recorded.answers == []
        recorded.send(**one, **index)
    recorded.stream.feed(b"data: [DONE]\n\n")
    recorded.stream.record_all()
    ((place, answer),) = recorded.answers
    expected = event("abcd", [1, 2, 3, 4], 4, last=True)
    assert (place, {**answer, **index}) == (0, expected | index)
    assert (recorded.errors, recorded.took_back) == ([], False)


def test_broken_cumulative_stream_is_recorded_as_far_as_it_came() -> None:
    recorded = CapturedStream()
    for count in range(1, 5):
        recorded.send(**event("abcd"[:count], list(range(1, count + 1)), count))
    recorded.stream.record_all()
    assert recorded.answers == [(0, event("abcd", [1, 2, 3, 4], 4))]


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("change", [None, [-7.0, 1, None]])
def test_a_logprob_that_changes_is_taken_back(place: int, change: Any) -> None:
    recorded = CapturedStream()
    for count in range(1, 5):
        told = event("abcd"[:count], list(range(1, count + 1)), count, last=count == 4)
        if count > place and change is not None:
            told["meta_info"]["output_token_logprobs"][0] = change
        recorded.send(**told)
    assert recorded.took_back == (change is not None)


@pytest.mark.parametrize(
    ("third", "fourth", "took_back"),
    [
        (event("abc", [1, 2, 3], 3), event("ab", [1, 2, 3, 4], 4, last=True), False),
        (event("abc", [1, 2, 3], 3), event("abX", [1, 2, 3, 4], 4, last=True), True),
        (event("abX", [1, 2, 3], 3), event("abc", [1, 2, 3, 4], 4, last=True), True),
        (event('ab"', [1, 2, 3], 3), event('ab"c', [1, 2, 3, 4], 4, last=True), False),
        (event('ab"', [1, 2, 3], 3), event("abc", [1, 2, 3, 4], 4, last=True), True),
        (event("abc", [1, 2, 3], 3), event("abcd", [1, 2, 34, 4], 4, last=True), True),
        (event("abc", [1, 2, 34], 3), event("abcd", [1, 2, 3, 4], 4, last=True), True),
    ],
)
def test_an_event_that_does_not_repeat_the_one_before_takes_it_back(
    third: dict[str, Any], fourth: dict[str, Any], took_back: bool
) -> None:
    """Only the last event may have a shorter text: a stop string is trimmed there."""
    recorded = CapturedStream()
    for one in (event("a", [1], 1), event("ab", [1, 2], 2), third, fourth):
        recorded.send(**one)
    assert recorded.took_back == took_back


def test_sequence_of_another_number_does_not_pass_for_the_only_one() -> None:
    """The third event continues the text and the tokens of the sequence whose events came before."""
    recorded = CapturedStream()
    for place, one in enumerate(cumulative("abcd")):
        recorded.send(**one, **({"index": 1} if place == 2 else {}))
    recorded.stream.record_all()
    assert [index for index, _ in recorded.answers] == [0, 1]


@pytest.mark.parametrize("spaced", [False, True])
def test_last_event_is_seen_wherever_its_reason_stands(spaced: bool) -> None:
    recorded = CapturedStream()
    *events, last = cumulative("abcdef")
    meta = last["meta_info"]
    meta["finish_reason"] = {"type": "length"}
    if spaced:
        last["meta_info"] = {name: meta[name] for name in reversed(meta)}
    for one in events:
        recorded.send(**one)
    assert recorded.answers == []
    recorded.send(**last)
    assert recorded.answers == [(0, last)]


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(text="X" + told["text"][1:]),
        lambda told: told.update(text=told["text"][:-2]),
        lambda told: told["output_ids"].__setitem__(3, 49),
        lambda told: told["output_ids"].__setitem__(0, 17),
        lambda told: told["output_ids"].__delitem__(slice(-2, None)),
        lambda told: told["meta_info"]["output_token_logprobs"].__setitem__(0, [-7.0, 1, None]),
        lambda told: told["meta_info"]["output_token_logprobs"].__setitem__(3, [-4 / 7, 4, None, 5]),
        lambda told: told["meta_info"]["output_token_logprobs"].__delitem__(slice(-2, None)),
    ],
)
@pytest.mark.parametrize("place", [4, 5, 6])
def test_each_event_of_a_long_stream_is_compared(place: int, change: Any) -> None:
    recorded = CapturedStream()
    for number, one in enumerate(cumulative("abcdefgh")):
        if number == place:
            change(one)
        recorded.send(**one)
    recorded.stream.record_all()
    assert recorded.took_back


def test_an_abort_that_says_nothing_but_its_reason_keeps_what_was_sampled() -> None:
    recorded = CapturedStream()
    recorded.send(**event("a", [1], 1))
    recorded.send(**event("ab", [1, 2], 2))
    recorded.send(**event("abc", [1, 2, 3], 3))
    recorded.send(meta_info={"finish_reason": {"type": "abort"}, "completion_tokens": 3})
    ((_, answer),) = recorded.answers
    assert (answer["text"], answer["output_ids"]) == ("abc", [1, 2, 3])
    assert len(answer["meta_info"]["output_token_logprobs"]) == 3


def test_cumulative_logprobs_beside_deltas_are_not_doubled() -> None:
    recorded = CapturedStream()
    recorded.send(**event("a", [1], 1))
    second = event("b", [2], 2, last=True)
    second["meta_info"]["output_token_logprobs"] = [[-1 / 7, 1, None], [-2 / 7, 2, None]]
    recorded.send(**second)
    assert recorded.answers == [(0, event("ab", [1, 2], 2, last=True))]


def test_an_error_after_the_start_leaves_what_was_sampled() -> None:
    recorded = CapturedStream()
    recorded.send(**event("a", [1], 1))
    recorded.send(error={"message": "broke"})
    recorded.stream.record_all()
    assert recorded.answers == [(0, event("a", [1], 1))]


def test_text_that_looks_like_the_end_is_text() -> None:
    recorded = CapturedStream()
    recorded.send(**event("a", [1], 1))
    recorded.send(**event('a"finish_reason": 1', [1, 2], 2))
    recorded.send(**event('a"finish_reason": 1,', [1, 2, 3], 3))
    assert recorded.answers == []


def test_events_after_the_last_one_change_nothing() -> None:
    """An error tells of an event that says more or something else."""
    recorded = CapturedStream()
    for _ in range(2):
        recorded.send(**event("a", [1], 1, last=True))
    assert recorded.errors == []
    recorded.send(**event("ab", [1, 2], 2, last=True))
    recorded.stream.record_all()
    assert recorded.answers == [(0, event("a", [1], 1, last=True))]
    assert [str(error) for error in recorded.errors] == ["a sequence continues after its finish reason"]


def test_cumulative_sequence_that_goes_on_behind_its_end_is_an_error() -> None:
    recorded = CapturedStream()
    events = cumulative("abcd")
    for one in (*events[:2], event("abc", [1, 2, 3], 3, last=True), events[3]):
        recorded.send(**one)
    assert [str(error) for error in recorded.errors] == ["a sequence continues after its finish reason"]


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 5\n\n", b'data: {"meta_info": 5}\n\n'])
def test_nonsense_is_a_failure_that_is_told(data: bytes) -> None:
    recorded = CapturedStream()
    recorded.stream.feed(data)
    assert len(recorded.errors) == 1


def test_a_failure_to_record_is_told() -> None:
    errors: list[Exception] = []

    def fail(index: int, answer: Any, took_back: bool) -> None:
        raise RuntimeError("out of order")

    GenerationStream(fail, errors.append).feed(b"data: %s\n\n" % orjson.dumps(event("a", [1], 1, last=True)))
    assert [str(error) for error in errors] == ["out of order"]


def test_deltas_that_do_not_add_up_are_recorded_by_their_counter() -> None:
    recorded = CapturedStream()
    recorded.send(**event("a", [1], 1))
    recorded.send(**event("b", [2], 3, last=True))
    ((_, answer),) = recorded.answers
    assert (answer["text"], answer["output_ids"]) == ("ab", [1, 2])
    assert contradiction(answer, prompt_tokens=None, rid=None) == "completion_tokens"
    assert recorded.errors == []


def test_an_event_that_is_nonsense_does_not_hide_the_next() -> None:
    recorded = CapturedStream()
    last = orjson.dumps(event("a", [1], 1, last=True))
    recorded.stream.feed(b"data: 5\n\ndata: %s\n\n" % last)
    recorded.stream.record_all()
    assert (len(recorded.errors), len(recorded.answers)) == (1, 1)
