"""One model for all engines."""

from __future__ import annotations

import pytest

from slime_engine.model import NgramModel, load_model


@pytest.fixture(scope="session")
def model() -> NgramModel:
    return load_model()
