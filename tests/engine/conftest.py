"""A real engine on a real socket for each test; the model is trained once for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from engine.served import Serve, Served, served
from own_time import OWN_TIME, Backend
from slime_engine.model import NgramModel, load_model
from slime_engine.settings import Settings


@pytest.fixture(scope="session")
def model() -> NgramModel:
    return load_model()


@pytest.fixture
def serve(model: NgramModel) -> Serve:
    """``async with serve(moe_layers=2) as engine:`` serves an engine with these settings."""

    def start(
        load: Callable[[], NgramModel] | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[Served]:
        return served(load or (lambda: model), Settings(**settings))

    return start


@pytest.fixture(scope="module")
def anyio_backend() -> Backend:
    """One event loop for a module, so that its tests may share an engine."""
    return OWN_TIME


@pytest.fixture(scope="module")
async def engine(model: NgramModel) -> AsyncIterator[Served]:
    """An engine with default settings, for tests that leave it as they found it."""
    async with served(lambda: model, Settings()) as running:
        yield running
