"""One fixture, ``kind``, with every backend that can be tested here."""

from __future__ import annotations

import pytest

from engine.backends.kinds import Kind
from own_time import Backend as EventLoop
from slime_engine.model import NgramModel
from slime_engine.stateless import StatelessBackend


@pytest.fixture(scope="module")
def anyio_backend() -> EventLoop:
    """An ordinary clock: other threads compute while the loop waits for them."""
    return "asyncio", {}


@pytest.fixture(scope="session", params=["ngram"])
def kind(request: pytest.FixtureRequest, model: NgramModel) -> Kind:
    update = {"model_path": "next", "weight_version": "2"}
    return Kind("ngram", lambda settings: StatelessBackend(model, settings), update)
