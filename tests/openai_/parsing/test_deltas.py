from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from slime_openai.parsing.deltas import (
    Arguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    Writer,
    finish_reason,
    message,
    new_call_id,
)
from slime_openai.parsing.tool_calls import mistral
from slime_openai.requests.messages import Message, ToolCall


def writer(*names: str, parallel: bool = True) -> Writer:
    return Writer({name: {} for name in names}, lambda: "call_x", parallel=parallel)


def test_deltas_fold_into_a_message() -> None:
    deltas: list[Delta] = [
        Reasoning("Let me"),
        Reasoning(" see."),
        Content("I'll "),
        Content("look."),
        CallStart(0, "call_a", "search"),
        Arguments(0, '{"q":'),
        Arguments(0, "1}"),
        CallStart(1, "call_b", "stop"),
        Arguments(1, "{}"),
    ]
    assert message(deltas) == Message(
        "assistant",
        content="I'll look.",
        reasoning="Let me see.",
        tool_calls=(ToolCall("search", '{"q":1}', "call_a"), ToolCall("stop", "{}", "call_b")),
    )


def test_only_beside_calls_the_content_is_none() -> None:
    assert message([]).content == ""
    assert message([Reasoning("Hm.")]).content == ""
    assert message([CallStart(0, "call_a", "stop"), Arguments(0, "{}")]).content is None


def test_text_of_a_kind_that_is_written_at_once_is_one_delta() -> None:
    made = writer()
    made.content("a")
    made.content("b")
    assert made.drain() == [Content("ab")]
    made.content("c")
    assert made.drain() == [Content("c")]
    assert made.finish() == []


def test_white_space_before_a_call_is_left_out() -> None:
    made = writer("search")
    made.content("Hello. \n\n")
    assert made.drain() == [Content("Hello.")]
    assert made.start("search")
    assert made.drain() == [CallStart(0, "call_x", "search")]


def test_white_space_without_a_call_is_content() -> None:
    made = writer("search")
    made.content("Hello.\n")
    assert made.drain() == [Content("Hello.")]
    assert made.finish() == [Content("\n")]


def test_white_space_behind_a_call_is_content_only_if_more_follows() -> None:
    made = writer("search")
    made.start("search")
    made.content("\n")
    assert made.drain() == [CallStart(0, "call_x", "search")]
    made.content("So\n")
    assert made.drain() == [Content("\nSo")]
    assert made.finish() == [Content("\n")]


def test_a_call_of_an_unknown_tool_is_refused() -> None:
    made = writer("search")
    assert not made.start("find")
    assert made.calls == 0


def test_a_second_call_is_refused_without_parallel_calls() -> None:
    made = writer("search", "stop", parallel=False)
    assert made.start("search")
    assert not made.start("stop")
    assert made.calls == 1


def test_ids_look_like_openai_s() -> None:
    assert all(re.fullmatch("call_[0-9a-f]{24}", new_call_id()) for _ in range(50))


@pytest.mark.parametrize("new_id", [new_call_id, mistral.new_id])
def test_ids_are_in_the_order_of_the_calls(new_id: Callable[[], str]) -> None:
    ids = [new_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert sorted(ids) == ids  # smolagents brings its calls into this order


def test_ids_of_mistral_differ_while_the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    for clock in ("monotonic_ns", "time_ns"):
        monkeypatch.setattr(time, clock, lambda: 62**9 - 1)
    ids = [mistral.new_id() for _ in range(50)]
    assert sorted(set(ids)) == ids


@pytest.mark.parametrize(
    ("reason", "called", "expected"),
    [
        ("stop", True, "tool_calls"),
        ("stop", False, "stop"),
        ("length", True, "length"),
        ("length", False, "length"),
    ],
)
def test_an_answer_that_is_complete_and_calls_ends_for_its_calls(
    reason: str, called: bool, expected: str
) -> None:
    assert finish_reason(reason, called=called) == expected
