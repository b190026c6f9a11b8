"""The embedded engine's tokenizer, as a directory that ``--hf-checkpoint`` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_engine.model import load_model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    load_model().tokenizer.save(directory)
    return str(directory)
