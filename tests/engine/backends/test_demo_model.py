"""Router, radix cache and two engines with a model of transformers, in one process: the demo, and its journal."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from router_core.cli import main
from slime_engine.model import NgramModel

pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from engine.hf.tiny import save_tiny  # after the check for torch


def test_every_trajectory_of_a_real_model_is_exact(
    model: NgramModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_tiny("mistral", model.tokenizer, tmp_path, 1)
    flags = ["--model", str(checkpoint), "--samples", "2", "--max-new-tokens", "24", "--json"]
    assert main(["demo", *flags]) == 0
    result = orjson.loads(capsys.readouterr().out)
    assert result["trajectories"] == result["exact"] == 16
    assert set(result["sampled_tokens_by_version"]) == {"1", "2"}
    assert result["cache_hits_per_turn"]["3"]["hit_rate"] == 1
    assert result["corrupted_after_turn"]["3"] > 8, "an untrained model writes what no tokenizer would"


def test_the_command_saves_the_tokenizer_of_a_model(model: NgramModel, tmp_path: Path) -> None:
    checkpoint = save_tiny("mistral", model.tokenizer, tmp_path / "tiny", 1)
    saved = tmp_path / "tokenizer"
    flags = ["--backend", "transformers", "--model", str(checkpoint), "--save-tokenizer", str(saved)]
    assert main(["engine", *flags]) == 0
    assert (saved / "tokenizer.json").exists()
