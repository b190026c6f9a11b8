"""The plugin: its flags, the layer that retries, and the circuit breakers."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router_core import Worker, hookimpl
from router_core.errors import HTTPError
from router_core.request import Request
from router_core.router import Router
from router_core.sender import Sender
from router_core.workers import WorkerChange
from slime_retries.breaker import Thresholds
from slime_retries.breakers import Breakers
from slime_retries.retrying import Retrying
from slime_retries.settings import Settings

__all__ = ["Retries", "add_options", "make_plugin"]


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    default, breaker = Settings(), Thresholds()
    parser.add_argument(
        "--retry-max-retries", type=int, default=default.attempts, metavar="N",
        help="how often a request is tried, the first time included (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-initial-backoff-ms", type=float, default=default.initial_backoff_s * 1000, metavar="MS",
        help="wait before the second attempt (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-max-backoff-ms", type=float, default=default.max_backoff_s * 1000, metavar="MS",
        help="longest wait between two attempts (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-backoff-multiplier", type=float, default=default.backoff_multiplier, metavar="FACTOR",
        help="growth of the wait from one attempt to the next (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--retry-jitter-factor", type=float, default=default.jitter, metavar="SHARE",
        help="share of the wait, 0 to 1, that is left to chance (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--disable-retries", action="store_true", help="try each request once")
    parser.add_argument(
        "--cb-failure-threshold", type=int, default=breaker.failures, metavar="N",
        help="failures in a row that open a worker's circuit breaker (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cb-success-threshold", type=int, default=breaker.successes, metavar="N",
        help="successes in a row that close it again (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--cb-timeout-duration-secs", type=float, default=breaker.timeout_s, metavar="S",
        help="how long it stays open before the worker is tried again (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--cb-window-duration-secs", type=float, default=breaker.window_s, metavar="S",
        help="time within which these failures must fall (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--disable-circuit-breaker", action="store_true", help="do without circuit breakers")


def make_plugin(options: argparse.Namespace) -> Retries:
    """The plugin with the flags of the command line. Raises SettingsError."""
    return Retries(Settings.from_options(options))


class Retries:
    """Asks other workers when one has failed, and leaves those alone that go on failing."""

    _breakers: Breakers  # from setup on

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @hookimpl
    def setup(self, router: Router) -> None:
        self._breakers = Breakers(self.settings.breaker, router.pool)
        router.components.register("breakers", self._breakers)

    @hookimpl(tryfirst=True)  # each attempt goes through all other layers
    def sender(self, inner: Sender, router: Router) -> Sender:
        return Retrying(self.settings, self._breakers, router, inner)

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
