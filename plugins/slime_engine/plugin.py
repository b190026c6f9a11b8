"""Engines inside the router's process, registered as its workers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from router_core import Worker, hookimpl
from router_core.router import Router
from slime_engine.app import make_backend_app
from slime_engine.backend import Backend
from slime_engine.backends import load_backend
from slime_engine.model import load_model
from slime_engine.settings import Settings
from slime_engine.stateless import StatelessBackend
from slime_http.serving import serving

__all__ = ["EnginePlugin"]


class EnginePlugin:
    """Starts ``workers`` engines. Each has its own loopback port and its own weights."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._settings = settings
        self._workers = workers
        self._backends: list[Backend] = []

    @hookimpl
    def setup(self, router: Router) -> None:
        """Load a backend for each engine, and register the model's tokenizer unless there is a tokenizer already."""
        if self._settings.backend == "ngram":
            model = load_model()
            self._backends = [StatelessBackend(model, self._settings) for _ in range(self._workers)]
        else:
            self._backends = [load_backend(self._settings) for _ in range(self._workers)]
        if "tokenizer" not in router.components:
            router.components.register("tokenizer", self._backends[0].tokenizer)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """Run the engines while the router serves."""
        async with AsyncExitStack() as stack:
            for number, backend in enumerate(self._backends):
                seed = self._settings.seed
                settings = replace(
                    self._settings,
                    seed=None if seed is None else seed + number,
                    kv_events_config=self._events_config(number),
                )
                url = await stack.enter_async_context(
                    serving(make_backend_app(settings, partial(_same, backend)), level=logging.DEBUG)
                )
                worker, _ = await router.add_worker(url)
                stack.callback(_remove, router, worker)
            yield

    def _events_config(self, number: int) -> str | None:
        """Return the KV events config of engine ``number``; None without a publisher. Each rank has its own ports."""
        config = self._settings.kv_events
        return None if config is None else config.shifted(number * self._settings.dp_size).as_json()


def _same(backend: Backend) -> Backend:
    return backend


def _remove(router: Router, worker: Worker) -> None:
    """Remove ``worker``, unless it was removed already, for example by an operator."""
    if worker in router.pool:
        router.pool.remove(worker, "its engine ends with the router")
