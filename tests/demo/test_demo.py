from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import orjson
import pytest

from deadlines import HANG_S
from router_core.cli import main
from slime_demo.conversations import Conversation
from slime_demo.verdict import Verdict, expected, judge

DEMO = [sys.executable, "-m", "router_core", "demo"]


def test_every_trajectory_of_the_demo_is_exact() -> None:
    done = subprocess.run(
        [*DEMO, "--json", "--samples", "2"], capture_output=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    result = orjson.loads(done.stdout)
    assert result["trajectories"] == result["exact"] == 16
    assert result["turns"] == 48
    assert result["wrong"] == {}
    assert set(result["sampled_tokens_by_version"]) == {"1", "2"}
    assert (
        result["cache_hits_per_turn"]["2"]["hit_rate"] == result["cache_hits_per_turn"]["3"]["hit_rate"] == 1
    )
    assert result["tokens_tokenised"] < result["tokens_tokenised_without_cache"]
    assert result["corrupted_by_tokenising_again"] > 0
    by_turn = result["corrupted_after_turn"]
    assert by_turn["1"] <= by_turn["2"] <= by_turn["3"] == result["corrupted_by_tokenising_again"]
    sampled, again = result["example"]["sampled"], result["example"]["tokenised_again"]
    assert sampled[:1] != again[:1]


def test_the_table_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--samples", "1"]) == 0
    shown, told = capsys.readouterr()
    assert told.startswith("a router, two engines with a tiny model, 8 conversations of 3 turns ...\n")
    assert "8 of 8" in shown
    assert "cache hits, turn 3" in shown


def test_a_turn_has_the_tokens_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--json", "--samples", "1", "--max-new-tokens", "5", "--temperature", "0.5"]
    assert main(["demo", *flags]) == 0
    result = orjson.loads(capsys.readouterr().out)
    assert 24 < sum(result["sampled_tokens_by_version"].values()) <= 8 * 3 * 5
    assert sum(result["sampled_tokens_by_version"].values()) == result["trained_tokens"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--samples", "0"],
        ["--samples", "x"],
        ["--quickly"],
        ["--max-new-tokens", "0"],
        ["--temperature", "-1"],
        ["--temperature", "inf"],
        ["--model", "nowhere"],
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("slime-router: ")
    assert said.count("\n") == 1
    assert "--engine" not in said, "the demo has no such flags"


# The judge itself: a fault in the answer must be seen.

_FIRST = {
    "rid": "a.1", "text": "34", "input_ids": [1, 2], "output_ids": [3, 4, 9], "output_logprobs": [-0.1, -0.2, -0.3],
    "output_versions": ["1", "1", "2"], "finish_reason": {"type": "stop", "matched": 9},
}  # fmt: skip
_SECOND = {
    "rid": "a.2", "text": "6", "input_ids": [1, 2, 3, 4, 9, 5], "output_ids": [6], "output_logprobs": [-0.5],
    "output_versions": ["2"], "finish_reason": {"type": "length", "length": 1},
}  # fmt: skip


def _answer() -> dict[str, Any]:
    return {
        "tokens": [1, 2, 3, 4, 9, 5, 6],
        "loss_mask": [0, 0, 1, 1, 1, 0, 1],
        "rollout_logp": [0.0, 0.0, -0.1, -0.2, -0.3, 0.0, -0.5],
        "generation_versions": [-1, -1, "1", "1", "2", -1, "2"],
        "exact": True,
    }


def _judged(answer: dict[str, Any], second: dict[str, Any] = _SECOND) -> Verdict:
    conversation = Conversation("a", "text", streamed=False, rids=["a.1", "a.2"], prompts=["t", "te"])
    journal = {"a.1": _FIRST, "a.2": second}
    return judge([conversation], {"a": answer}, journal, lambda text: [1, 2, 3, 4, 9, 5, 6], _decode)


def _decode(ids: list[int]) -> str:
    return "".join(str(token) for token in ids if token != 9)


def test_the_journal_says_what_the_answer_must_be() -> None:
    assert expected([_FIRST, _SECOND], _decode) | {"exact": True} == _answer()
    verdict = _judged(_answer())
    assert (verdict.exact, verdict.corrupted, verdict.wrong) == (1, 0, {})
    assert verdict.tokens_by_version == {"1": 2, "2": 2}


@pytest.mark.parametrize("key", ["tokens", "loss_mask", "rollout_logp", "generation_versions"])
@pytest.mark.parametrize("place", range(7))
def test_one_wrong_value_is_seen(key: str, place: int) -> None:
    answer = _answer()
    answer[key][place] = 77
    verdict = _judged(answer)
    assert verdict.exact == 0
    assert key in verdict.wrong["a"]


def test_an_answer_that_says_it_is_not_exact_does_not_count_as_exact() -> None:
    verdict = _judged(_answer() | {"exact": False, "inexact_reason": "evicted"})
    assert verdict.exact == 0
    assert "evicted" in verdict.wrong["a"]


def test_only_a_hidden_stop_token_may_be_missing_in_later_turns() -> None:
    second = copy.deepcopy(_SECOND) | {"input_ids": [1, 2, 3, 4, 5]}
    assert expected([_FIRST, second], _decode)["loss_mask"] == [0, 0, 1, 1, 0, 1]
    second = copy.deepcopy(_SECOND) | {"input_ids": [1, 2, 3, 9, 5]}
    with pytest.raises(ValueError, match=r"a\.1"):
        expected([_FIRST, second], _decode)
