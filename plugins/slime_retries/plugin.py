"""The plugin: its flags, the layer that retries, and the circuit breakers."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router_core import Worker, hookimpl
from router_core.errors import HTTPError
from router_core.request import Request
from router_core.router import Router
from router_core.sender import Sender
from router_core.workers import WorkerChange
from slime_retries.attempts import Tally
from slime_retries.breakers import Breakers
from slime_retries.retrying import Retrying
from slime_retries.settings import Settings, add_retry_options

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["Retries", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_retry_options(parser)


def make_plugin(options: argparse.Namespace) -> Retries:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    return Retries(Settings.from_options(options))


class Retries:
    """Retries failed requests at other workers, and keeps requests from workers that go on failing."""

    _breakers: Breakers  # set in setup

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._tally = Tally()

    @hookimpl
    def setup(self, router: Router) -> None:
        self._breakers = Breakers(self.settings.breaker, router.pool)
        router.components.register("breakers", self._breakers)
        metrics: Metrics | None = router.components.find("metrics")
        if metrics is not None:
            self._offer(metrics)

    def _offer(self, metrics: Metrics) -> None:
        breakers = self._breakers
        metrics.counter(
            "smg_worker_retries_total", "Attempts after the first one.", lambda: self._tally.retries
        )
        metrics.counter(
            "smg_worker_retries_exhausted_total",
            "Requests that failed in the last attempt that they may have.",
            lambda: self._tally.exhausted,
        )
        metrics.gauge(
            "smg_worker_cb_state",
            "Circuit breaker of a worker. 0: closed. 1: open. 2: half-open.",
            breakers.codes,
            ["worker"],
        )
        metrics.counter(
            "smg_worker_cb_transitions_total",
            "Changes of circuit breakers.",
            lambda: breakers.transitions,
            ["from", "to"],
        )

    @hookimpl(tryfirst=True)  # each attempt goes through all other layers
    def sender(self, inner: Sender, router: Router) -> Sender:
        return Retrying(self.settings, self._breakers, self._tally, router, inner)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._breakers.close()

    @hookimpl
    def attempt_failed(self, worker: Worker, request: Request, error: HTTPError | None) -> None:
        if error is not None:
            self._breakers.failed(worker, request, str(error))

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change in ("added", "removed", "readmitted"):
            self._breakers.forget(worker)
