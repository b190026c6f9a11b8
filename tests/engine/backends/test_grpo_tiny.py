"""The example that trains a tiny model through the router, in short: four runs of two steps."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest

_ROOT = Path(__file__).parents[3]

pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")
pytest.importorskip("matplotlib", reason="needs matplotlib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The steps of each run, as the command writes them. Another process would import torch again."""
    out = tmp_path_factory.mktemp("grpo")
    with pytest.MonkeyPatch.context() as patch, catch_warnings():
        simplefilter("default")  # as in a process of its own
        patch.syspath_prepend(_ROOT)
        patch.setattr(sys, "argv", ["grpo_tiny", "--steps", "2", "--samples", "4", "--out", str(out)])
        import_module("examples.grpo_tiny.__main__").main()
    assert (out / "grpo_tiny.png").read_bytes().startswith(b"\x89PNG")
    document: dict[str, list[dict[str, Any]]] = json.loads((out / "results.json").read_text())
    return document


@pytest.mark.parametrize("name", ["dense, exact tokens", "MoE, experts replayed"])
def test_the_trainer_agrees_with_the_rollout(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    """In the second step, too: the engine has the trainer's weights then."""
    first, second = runs[name]
    for step in (first, second):
        assert step["max_difference"] < 0.03, "more than the noise of bfloat16"
        assert step["other_tokens"] == 0
    assert first["reward"] != second["reward"]


def test_text_that_is_tokenised_again_is_not_what_was_sampled(runs: dict[str, list[dict[str, Any]]]) -> None:
    first, _ = runs["dense, text tokenised again"]
    assert first["reward"] == runs["dense, exact tokens"][0]["reward"], "the same rollouts"
    assert first["other_tokens"] > 0.8
    assert first["mean_difference"] > 0.5


def test_experts_that_are_not_replayed_are_others_for_some_tokens(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    replayed, selected = runs["MoE, experts replayed"], runs["MoE, experts not replayed"]
    assert replayed[0]["reward"] == selected[0]["reward"], "the same rollouts"
    worst = max(step["max_difference"] for step in selected)
    assert worst > 1.5 * max(step["max_difference"] for step in replayed)
