"""Engines inside the router's process, registered as its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from router_core import Worker, hookimpl
from router_core.router import Router
from slime_engine.app import make_app
from slime_engine.model import NgramModel, load_model
from slime_engine.settings import Settings
from slime_http.serving import serving

__all__ = ["EnginePlugin"]


class EnginePlugin:
    """Starts ``workers`` engines, each behind a loopback port of its own, over one shared model."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._settings = settings
        self._workers = workers
        self._model: NgramModel | None = None

    @hookimpl
    def setup(self, router: Router) -> None:
        """Register the model's tokenizer, unless there is a tokenizer already."""
        self._model = load_model()
        if "tokenizer" not in router.components:
            router.components.register("tokenizer", self._model.tokenizer)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """Run the engines while the router serves."""
        model = self._model
        assert model is not None, "setup comes before lifespan"
        async with AsyncExitStack() as stack:
            for number in range(self._workers):
                seed = self._settings.seed
                settings = replace(self._settings, seed=None if seed is None else seed + number)
                url = await stack.enter_async_context(serving(make_app(settings, lambda: model)))
                worker, _ = await router.add_worker(url)
                stack.callback(_remove, router, worker)
            yield


def _remove(router: Router, worker: Worker) -> None:
    """Remove ``worker``, unless an operator has done so already."""
    if worker in router.pool:
        router.pool.remove(worker)
