"""The judge itself: one wrong value must be seen, and what text cannot tell apart must pass."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest

from chaos.conversations import Conversation, Heard
from chaos.oracle import JournalReader, Oracle

#: Ids are digits, and their text is the digit; 9 is hidden.
_FIRST: dict[str, Any] = {
    "rid": "s.1", "input_ids": [1, 2], "output_ids": [3, 4, 9], "output_logprobs": [-0.1, -0.2, -0.3],
    "output_versions": ["1", "1", "2"], "finish_reason": {"type": "stop", "matched": 9}, "aborted": False,
}  # fmt: skip
_SECOND: dict[str, Any] = {
    "rid": "s.2", "input_ids": [1, 2, 3, 4, 9, 5], "output_ids": [6], "output_logprobs": [-0.5],
    "output_versions": ["2"], "finish_reason": {"type": "length", "length": 1}, "aborted": False,
}  # fmt: skip


def _shown(ids: list[int]) -> str:
    return "".join(str(one) for one in ids if one != 9)


def _heard(entry: dict[str, Any], told: str | None = None, **other: Any) -> Heard:
    told = told if told is not None else _shown(entry["output_ids"])
    values = {
        "rid": entry["rid"], "told": told, "text": told, "output_ids": entry["output_ids"],
        "logprobs": entry["output_logprobs"], "prompt_tokens": len(entry["input_ids"]),
        "reason": entry["finish_reason"], "asked_at": 0.0, "heard_at": 1.0,
    }  # fmt: skip
    return Heard(**values | other)


def _conversation(session: str = "s", shown: int | None = None) -> Conversation:
    conversation = Conversation(session, "12", Random(0))
    conversation.take(_heard(_FIRST), shown)
    conversation.text += "5"
    conversation.take(_heard(_SECOND))
    return conversation


def _said() -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3, 4, 9, 5, 6],
        "loss_mask": [0, 0, 1, 1, 1, 0, 1],
        "rollout_logp": [0.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.5],
        "generation_versions": [-1, -1, "1", "1", "2", -1, "2"],
        "token_length": 7,
        "exact": True,
        "inexact_reason": None,
    }


def test_what_the_journals_say_is_right() -> None:
    assert Oracle([_FIRST, _SECOND], _shown).judge(_conversation(), _said()) is None


@pytest.mark.parametrize("key", ["tokens", "loss_mask", "rollout_logp", "generation_versions"])
@pytest.mark.parametrize("place", range(7))
def test_one_wrong_value_is_seen(key: str, place: int) -> None:
    said = _said()
    said[key][place] = 77
    assert Oracle([_FIRST, _SECOND], _shown).judge(_conversation(), said) is not None


@pytest.mark.parametrize("key", ["tokens", "loss_mask", "rollout_logp", "generation_versions"])
def test_a_column_that_is_too_short_is_seen(key: str) -> None:
    said = _said()
    said[key].pop()
    assert Oracle([_FIRST, _SECOND], _shown).judge(_conversation(), said) == "lengths differ"


def test_flagged_answer_is_not_wrong_unless_it_has_no_reason() -> None:
    oracle = Oracle([_FIRST, _SECOND], _shown)
    assert oracle.judge(_conversation(), _said() | {"exact": False, "inexact_reason": "evicted"}) is None
    assert oracle.judge(_conversation(), _said() | {"exact": False}) is not None


def test_a_sampled_answer_that_was_tokenised_again_is_seen() -> None:
    second = copy.deepcopy(_SECOND) | {"input_ids": [1, 2, 34, 5]}
    said = {
        "tokens": [1, 2, 34, 5, 6], "loss_mask": [0, 0, 0, 0, 1], "rollout_logp": [0.0, 0.0, 0.0, 0.0, -0.5],
        "generation_versions": [-1, -1, -1, -1, "2"], "token_length": 5, "exact": True, "inexact_reason": None,
    }  # fmt: skip
    assert Oracle([_FIRST, second], _shown).judge(_conversation(), said) is not None


def test_what_a_client_cut_off_must_not_be_there() -> None:
    second = copy.deepcopy(_SECOND) | {"input_ids": [1, 2, 3, 5]}
    said = {
        "tokens": [1, 2, 3, 5, 6], "loss_mask": [0, 0, 1, 0, 1], "rollout_logp": [0.0, 0.0, -0.1, 0.0, -0.5],
        "generation_versions": [-1, -1, "1", -1, "2"], "token_length": 5, "exact": True, "inexact_reason": None,
    }  # fmt: skip
    oracle = Oracle([_FIRST, second], _shown)
    assert oracle.judge(_conversation(shown=1), said) is None
    assert oracle.judge(_conversation(), said) is not None


def test_fork_may_continue_an_equal_sample_and_its_parent_may_not() -> None:
    other = copy.deepcopy(_FIRST) | {"rid": "t.1", "output_logprobs": [-0.7, -0.8, -0.9]}
    said = _said()
    said["rollout_logp"][2:5] = [-0.7, -0.8, -0.9]
    oracle = Oracle([_FIRST, other, _SECOND], _shown)
    assert oracle.judge(_conversation(), said) is not None
    assert oracle.judge(_conversation("fork"), said) is None


def test_an_answer_is_found_in_the_journal_or_is_wrong() -> None:
    oracle = Oracle([_FIRST], _shown)
    assert oracle.source(_heard(_FIRST)) == _FIRST
    wrongs: list[dict[str, Any]] = [
        {"output_ids": [3, 4, 8]}, {"logprobs": [-0.1, -0.2, -0.4]}, {"prompt_tokens": 3}, {"rid": "s.9"},
    ]  # fmt: skip
    for wrong in wrongs:
        assert oracle.source(_heard(_FIRST, **wrong)) is None
    part: dict[str, Any] = {"output_ids": [3, 4], "logprobs": [-0.1, -0.2]}
    assert oracle.source(_heard(_FIRST, **part)) is None, "it says that it is whole"
    assert oracle.source(_heard(_FIRST, **part, reason=None)) == _FIRST


def test_what_an_engine_continued_after_an_abort_counts_as_one_answer() -> None:
    aborted = copy.deepcopy(_FIRST) | {"finish_reason": {"type": "abort"}, "aborted": True}
    rest = copy.deepcopy(_SECOND) | {"rid": "s.1", "input_ids": [1, 2, 3, 4, 9]}
    joined: dict[str, Any] = {
        "rid": "s.1",
        "output_ids": [3, 4, 9, 6],
        "logprobs": [-0.1, -0.2, -0.3, -0.5],
        "prompt_tokens": 2,
    }
    assert Oracle([aborted, rest], _shown).source(_heard(_FIRST, **joined)) is not None


def test_a_journal_is_read_as_it_grows(tmp_path: Any) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert list(reader.entries()) == []
    path.write_bytes(
        b'{"entry":"a.0","rid":"one","input_ids":[1],"temperature":1.0}\n{"entry":"a.0","output_ids":[2],'
    )
    assert reader.unfinished() == {"one"}
    with path.open("ab") as file:
        file.write(b'"output_logprobs":[-0.1],"output_versions":["1"],"finish_reason":{"type":"stop"}}\n')
    assert [entry["output_ids"] for entry in reader.entries()] == [[2]]
    assert reader.unfinished() == set()
