"""Models of transformers read in several threads of one process, as several engines do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slime_engine.model import NgramModel

torch = pytest.importorskip("torch", reason="needs torch: pip install 'slime-router[transformers-engine]'")

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402  # after the check for torch

from engine.hf.tiny import save_tiny  # noqa: E402
from slime_engine.hf.loading import load_whole  # noqa: E402


def test_loads_in_several_threads_leave_the_library_as_it_was(model: NgramModel, tmp_path: Path) -> None:
    """Overlapping loads left ``tie_weights`` without effect: weights of later models were missing."""
    path, tie = save_tiny("mistral", model.tokenizer, tmp_path, 1), PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load_whole(AutoModelForCausalLM, path), range(24)))
    assert PreTrainedModel.tie_weights is tie
    assert len({float(one.get_output_embeddings().weight.detach().sum()) for one in loaded}) == 1
