"""Router, radix cache and two engines with a model of transformers, in one process: the demo, and its journal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from deadlines import HANG_S
from slime_engine.model import NgramModel

pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from engine.hf.tiny import save_tiny  # after the check for torch


def test_every_trajectory_of_a_real_model_is_exact(model: NgramModel, tmp_path: Path) -> None:
    checkpoint = save_tiny("mistral", model.tokenizer, tmp_path, 1)
    flags = ["--model", str(checkpoint), "--samples", "2", "--max-new-tokens", "24", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "router_core", "demo", *flags],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    result = orjson.loads(done.stdout)
    assert result["trajectories"] == result["exact"] == 16
    assert set(result["sampled_tokens_by_version"]) == {"1", "2"}
    assert result["cache_hits_per_turn"]["3"]["hit_rate"] == 1
    assert result["corrupted_after_turn"]["3"] > 8, "an untrained model writes what no tokenizer would"


def test_the_command_saves_the_tokenizer_of_a_model(model: NgramModel, tmp_path: Path) -> None:
    checkpoint = save_tiny("mistral", model.tokenizer, tmp_path / "tiny", 1)
    saved = tmp_path / "tokenizer"
    code = "import sys; from slime_engine.command import main; sys.exit(main(sys.argv[1:]))"
    flags = ["--backend", "transformers", "--model", str(checkpoint), "--save-tokenizer", str(saved)]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (saved / "tokenizer.json").exists()
