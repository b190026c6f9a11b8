"""Events of every shape that SGLang writes, put together to the answer of an unstreamed request."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aborting_engine import ABORT, SequenceEvents
from slime_sglang import AnswerSoFar, contradiction, whole_answer

STOP = {"type": "stop", "matched": 99}


def sequence_of(pieces: Sequence[str], *, incremental: bool, logprobs: bool = True) -> SequenceEvents:
    """Return a sequence with these texts of its tokens; two tokens have each id."""
    ids = [100 + place // 2 for place in range(len(pieces))]
    return SequenceEvents(ids, pieces, incremental, logprobs)


def told_by(
    events: Iterator[dict[str, Any]] | list[dict[str, Any]], *, held: bool = False
) -> tuple[AnswerSoFar, str]:
    """The answer that ``events`` come to, and the text that was new in each. ``held``: they are parsed when needed."""
    so_far, told = AnswerSoFar(), ""
    for event in events:
        if held and so_far.cumulative and event["meta_info"]["finish_reason"] is None:
            new = event["text"][len(told) :]
            so_far.hold(orjson.dumps(event), new)
        else:
            before = copy.deepcopy(event)
            new = so_far.take(event)
            assert event == before
        told += new
    return so_far, told


PIECES = st.lists(st.sampled_from(["a", "b", "aa", "ab", "", "\ufffd"]), min_size=1, max_size=9)


@given(PIECES, st.data(), st.booleans(), st.booleans(), st.booleans())
def test_a_stream_comes_to_the_unstreamed_answer(
    pieces: list[str], data: st.DataObject, incremental: bool, logprobs: bool, held: bool
) -> None:
    sequence = sequence_of(pieces, incremental=incremental, logprobs=logprobs)
    ends = [*sorted(data.draw(st.sets(st.integers(1, len(pieces))))), len(pieces)]
    events, told = [], 0
    for place, end in enumerate(ends, 1):
        events.append(sequence.event(told, end, STOP if place == len(ends) else None))
        told = end
    so_far, text = told_by(events, held=held and not incremental)
    assert (so_far.answer, text) == (sequence.whole(STOP), "".join(pieces))


@given(PIECES, st.data(), st.booleans(), st.booleans())
def test_an_abort_out_of_the_waiting_queue_says_nothing_twice(
    pieces: list[str], data: st.DataObject, incremental: bool, held: bool
) -> None:
    """Cumulative events may be lost: only the newest one is sent."""
    sequence = sequence_of(pieces, incremental=incremental)
    ends = sorted(data.draw(st.sets(st.integers(1, len(pieces)))))
    events, told = [], 0
    for end in ends:
        events.append(sequence.event(told, end))
        told = end
    events.append(sequence.queued(told, len(pieces)))
    so_far, text = told_by(events, held=held and not incremental)
    expected = sequence.whole(ABORT)
    if not events[:-1]:
        del expected["meta_info"]["prompt_tokens"]
    assert (so_far.answer, text) == (expected, "".join(pieces))
    assert contradiction(so_far.answer, prompt_tokens=4, rid="r") is None


@given(PIECES, st.data(), st.booleans())
def test_an_abort_without_logprobs_names_the_tokens_that_were_told(
    pieces: list[str], data: st.DataObject, incremental: bool
) -> None:
    sequence = sequence_of(pieces, incremental=incremental, logprobs=False)
    ends = sorted({*data.draw(st.sets(st.integers(1, len(pieces)))), len(pieces)})
    events, told = [], 0
    for end in ends:
        events.append(sequence.event(told, end))
        told = end
    so_far, text = told_by([*events, sequence.queued(told, told)])
    assert (so_far.answer, text) == (sequence.whole(ABORT), "".join(pieces))


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(
    "bare",
    [
        {"meta_info": {"finish_reason": ABORT}},
        {"meta_info": {"id": "r", "finish_reason": ABORT}, "text": ""},
        {"meta_info": {"id": "r", "finish_reason": ABORT}, "text": "", "output_ids": []},
        {
            "meta_info": {"id": "r", "finish_reason": ABORT, "completion_tokens": 4},
            "text": None,
            "output_ids": None,
        },
        {"meta_info": {"finish_reason": ABORT, "weight_version": "2"}},
    ],
)
def test_a_bare_abort_takes_nothing_away(incremental: bool, bare: dict[str, Any]) -> None:
    sequence = sequence_of(["one", " two", " three", " four"], incremental=incremental)
    so_far, text = told_by([*(sequence.event(end - 1, end) for end in range(1, 5)), bare])
    assert text == "one two three four"
    assert so_far.answer == sequence.whole(ABORT)


def test_an_abort_before_the_first_token_has_none() -> None:
    event = {"text": "", "output_ids": [], "meta_info": {"finish_reason": ABORT, "completion_tokens": 0}}
    assert whole_answer(event) == event


def test_an_abort_that_is_the_first_event_names_all_its_logprobs_name() -> None:
    sequence = sequence_of("abcd", incremental=False)
    answer = whole_answer(sequence.queued(0, 4))
    assert (answer["text"], answer["output_ids"]) == ("abcd", sequence.ids)


def test_unnamed_sequence_of_an_abort_is_a_contradiction() -> None:
    sequence = sequence_of("abcd", incremental=False, logprobs=False)
    answer = whole_answer(sequence.queued(0, 4))
    assert contradiction(answer, prompt_tokens=4, rid="r") == "completion_tokens"


def test_an_abort_of_newer_weights_does_not_rename_older_tokens() -> None:
    sequence = sequence_of("abcd", incremental=False)
    last = sequence.queued(2, 4)
    last["meta_info"]["weight_version"] = "2"
    so_far, _ = told_by([sequence.event(0, 2), sequence.event(2, 4), last])
    assert so_far.meta["weight_version"] == "1"


@pytest.mark.parametrize("incremental", [False, True])
def test_counters_that_do_not_fit_lose_no_token(incremental: bool) -> None:
    sequence = sequence_of("abcd", incremental=incremental)
    events = [sequence.event(end - 1, end, STOP if end == 4 else None) for end in range(1, 5)]
    for event in events:
        event["meta_info"]["completion_tokens"] = 9
    so_far, text = told_by(events)
    assert (so_far.text, so_far.ids, text) == ("abcd", sequence.ids, "abcd")
    assert contradiction(so_far.answer, prompt_tokens=4, rid="r") == "completion_tokens"


def test_counters_of_each_delta_alone_are_seen() -> None:
    sequence = sequence_of("abcd", incremental=True)
    events = [sequence.event(end - 1, end, STOP if end == 4 else None) for end in range(1, 5)]
    for event in events:
        event["meta_info"]["completion_tokens"] = 1
    so_far, text = told_by(events[::2])
    assert (so_far.ids, text) == (sequence.ids[::2], "ac")
    assert contradiction(so_far.answer, prompt_tokens=4, rid="r") == "completion_tokens"


def test_an_answer_that_was_read_stays_as_it_is() -> None:
    sequence = sequence_of("abcd", incremental=True)
    so_far, _ = told_by([sequence.event(0, 1), sequence.event(1, 2)])
    early, twin = so_far.answer, so_far.copy()
    before = copy.deepcopy(early)
    so_far.take(sequence.event(2, 4, STOP))
    assert early == before
    assert (twin.answer, twin.text) == (before, "ab")
    twin.take(sequence.event(2, 3))
    assert so_far.answer == sequence.whole(STOP)


def test_a_trimmed_stop_string_shortens_the_text() -> None:
    sequence = sequence_of(["a", "<", "/s>"], incremental=False)
    last = sequence.event(0, 3, STOP) | {"text": "a"}
    so_far, text = told_by([sequence.event(0, 1), sequence.event(0, 2), last])
    assert (so_far.answer["text"], text) == ("a", "a<")


def test_engines_that_name_no_tokens_repeat_their_text() -> None:
    events = [{"text": text, "meta_info": {"finish_reason": None}} for text in ("a", "ab", "abc")]
    so_far, text = told_by(events)
    assert (so_far.answer["text"], text, so_far.ids) == ("abc", "abc", [])


@pytest.mark.parametrize("incremental", [False, True])
def test_servers_without_a_tokenizer_stream_ids_alone(incremental: bool) -> None:
    sequence = sequence_of("abcd", incremental=incremental)
    events = [sequence.event(end - 1, end, STOP if end == 4 else None) for end in range(1, 5)]
    for event in events:
        del event["text"]
    so_far, text = told_by(events)
    whole = sequence.whole(STOP)
    del whole["text"]
    assert (so_far.answer, text) == (whole, "")


def test_logprobs_that_are_no_list_are_left_for_the_judge() -> None:
    sequence = sequence_of("abcd", incremental=True)
    events = [sequence.event(end - 1, end, STOP if end == 4 else None) for end in range(1, 5)]
    events[1]["meta_info"]["output_token_logprobs"] = "none"
    so_far, text = told_by(events)
    assert (so_far.ids, text) == (sequence.ids, "abcd")
    assert contradiction(so_far.answer, prompt_tokens=4, rid="r") == "output_token_logprobs"


def test_an_abort_with_logprobs_of_other_tokens_names_none_of_them() -> None:
    sequence = sequence_of("abcd", incremental=False)
    last = sequence.queued(3, 4)
    last["meta_info"]["output_token_logprobs"] = [[-1.0, 5, None]] * 4
    so_far, text = told_by([sequence.event(0, 2), sequence.event(0, 3), last])
    assert (so_far.ids, text) == (sequence.ids, "abcd")
    assert contradiction(so_far.answer, prompt_tokens=4, rid="r") == "output_token_logprobs"


def test_an_abort_that_says_the_last_token_again_may_have_more_text() -> None:
    sequence = sequence_of("abcd", incremental=True)
    held_back = sequence.queued(4, 4) | {"text": "abcd!"}
    so_far, text = told_by([sequence.event(0, 2), sequence.event(2, 4), held_back])
    assert (so_far.text, text, so_far.ids) == ("abcd!", "abcd!", sequence.ids)


@pytest.mark.parametrize("logprobs", [False, True])
def test_an_abort_that_says_another_text_takes_nothing_back(logprobs: bool) -> None:
    sequence = sequence_of("abcd", incremental=True, logprobs=logprobs)
    other = sequence.queued(4, 4) | {"text": "?!"}
    so_far, text = told_by([sequence.event(0, 2), sequence.event(2, 4), other])
    assert (so_far.text, text, so_far.ids) == ("abcd", "abcd", sequence.ids)


def test_events_with_cumulative_logprobs_and_new_ids_stay_as_they_are() -> None:
    """Two readers may share the events. Some servers send cumulative lists beside new ids, here up to a last delta."""
    cumulative, deltas = (sequence_of("abcdef", incremental=incremental) for incremental in (False, True))
    events = [deltas.event(end - 1, end) for end in range(1, 7)]
    for end, event in enumerate(events[:5], 1):
        event["meta_info"] = cumulative.event(0, end)["meta_info"]
    before = copy.deepcopy(events)
    readers = AnswerSoFar(), AnswerSoFar()
    for event in events:
        for reader in readers:
            reader.take(event)
    assert events == before
    for reader in readers:
        assert (
            reader.meta["output_token_logprobs"]
            == cumulative.event(0, 6)["meta_info"]["output_token_logprobs"]
        )


@pytest.mark.parametrize("place", [2, 4])
def test_text_is_not_repeated_when_an_event_names_other_ids(place: int) -> None:
    sequence = sequence_of("abcdef", incremental=False)
    events = [sequence.event(0, end) for end in range(1, 7)]
    events[place]["output_ids"][0] = 7
    so_far, told = told_by(events)
    assert (so_far.text, told) == ("abcdef", "abcdef")
    assert so_far.rewritten


def test_a_held_event_is_parsed_when_the_next_does_not_repeat_it() -> None:
    sequence = sequence_of("abcd", incremental=False)
    so_far, _ = told_by([sequence.event(0, 1), sequence.event(0, 2)])
    so_far.hold(orjson.dumps(sequence.event(0, 3)), "c")
    so_far.hold(orjson.dumps(sequence.event(0, 4)), "d")
    assert so_far.take({"meta_info": {"finish_reason": ABORT}}) == ""
    assert so_far.answer == sequence.whole(ABORT)


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"meta_info": 5},
        {"text": 5, "meta_info": {}},
        {"output_ids": 5, "meta_info": {}},
        {"meta_info": {"output_token_logprobs": [1]}},
    ],
)
def test_invalid_answer_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"wanted|no answer"):
        AnswerSoFar().take(event)


def test_before_the_first_event_there_is_nothing() -> None:
    so_far = AnswerSoFar()
    assert (so_far.begun, so_far.ids, so_far.meta, so_far.text) == (False, [], {}, "")
    with pytest.raises(LookupError):
        so_far.answer  # noqa: B018  # reading it is what fails


def test_logprobs_that_do_not_repeat_earlier_ones_are_new() -> None:
    """Two for one new token are as many as all tokens, but not those of all."""
    so_far = AnswerSoFar()
    for count, logprobs in ((1, [[-0.1, 198, None]]), (2, [[-0.2, 198, None], [-0.3, 198, None]])):
        meta = {"completion_tokens": count, "finish_reason": None, "output_token_logprobs": logprobs}
        so_far.take({"text": "\n", "output_ids": [198], "meta_info": meta})
    assert so_far.answer["output_ids"] == [198, 198]
    assert contradiction(so_far.answer, prompt_tokens=None, rid=None) == "output_token_logprobs"


def test_an_event_that_repeats_logprobs_is_no_delta_whatever_it_counts() -> None:
    so_far = AnswerSoFar()
    for ids, count in (([7], 1), ([7, 8, 9], 4)):  # three would be right, and one and three are four
        logprobs = [[-token / 7, token, None] for token in ids]
        meta = {"completion_tokens": count, "finish_reason": None, "output_token_logprobs": logprobs}
        so_far.take({"text": "abc"[: len(ids)], "output_ids": ids, "meta_info": meta})
    assert (so_far.answer["output_ids"], so_far.answer["text"]) == ([7, 8, 9], "abc")
    assert contradiction(so_far.answer, prompt_tokens=None, rid=None) == "completion_tokens"


def test_logprobs_without_the_ids_that_came_before_are_no_new_tokens() -> None:
    """They repeat those of the event before; as a delta they would be another token of the same name."""
    so_far = AnswerSoFar()
    logprobs = [[-0.5, 158, None]]
    for ids, count, reason in (([158], 1, None), (None, 2, {"type": "abort", "message": "new weights"})):
        meta = {"completion_tokens": count, "finish_reason": reason, "output_token_logprobs": logprobs}
        so_far.take({"text": "", "meta_info": meta} | ({"output_ids": ids} if ids is not None else {}))
    assert so_far.answer["output_ids"] == [158]
    assert contradiction(so_far.answer, prompt_tokens=None, rid=None) == "completion_tokens"
