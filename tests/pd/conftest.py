"""One model for all engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_engine.model import NgramModel, load_model


@pytest.fixture(scope="session")
def model() -> NgramModel:
    return load_model()


@pytest.fixture(scope="session")
def checkpoint(model: NgramModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    model.tokenizer.save(path)
    return str(path)
