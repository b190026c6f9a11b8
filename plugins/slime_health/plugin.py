"""One loop per worker: probe, count, quarantine, readmit."""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx

from router_core import Worker, hookimpl
from router_core.hookspecs import WorkerChange
from router_core.router import Router
from slime_health.settings import Settings

__all__ = ["Health", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument(
        "--health-check-interval-secs", type=float, default=default.interval_s, metavar="S",
        help="time between two probes of a worker (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-check-timeout-secs", type=float, default=default.timeout_s, metavar="S",
        help="deadline of a probe (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-failure-threshold", type=int, default=default.failure_threshold, metavar="N",
        help="failed probes in a row that quarantine a worker (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--health-check-endpoint", default=default.endpoint, metavar="PATH",
        help="what is probed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--disable-health-check", action="store_true", help="do not probe")


def make_plugin(options: argparse.Namespace) -> Health:
    """The plugin with the flags of the command line. Raises SettingsError."""
    return Health(Settings.from_options(options))


class Health:
    """Probes each worker on connections of its own, which traffic cannot fill.

    ``failure_threshold`` failures in a row quarantine a worker: it gets no new requests, and those in flight go on.
    The first success brings it back. Changed only by functions without ``await`` in between.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._router: Router | None = None
        self._client: httpx.AsyncClient | None = None
        self._failures: dict[str, int] = {}  # in a row, of each worker that is attended

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        if not self.settings.enabled:
            yield
            return
        # One connection a worker, and none kept: a probe that hangs holds back nobody else's.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            trust_env=False, limits=limits, timeout=self.settings.timeout_s, verify=router.worker_tls
        ) as self._client:
            self._router = router
            try:
                yield
            finally:
                self._router = None

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change == "added" and self._router is not None:
            attended = worker.id in self._failures
            self._failures[worker.id] = 0
            if not attended:
                self._router.tasks.start_soon(self._attend, self._router, worker)

    async def _attend(self, router: Router, worker: Worker) -> None:
        try:
            await anyio.sleep(random.uniform(0, self.settings.interval_s))  # workers are not probed in step
            while worker in router.pool:
                trouble = await self._probe(worker)
                if trouble is None:
                    self._failures[worker.id] = 0
                    if worker.state == "quarantined":
                        router.pool.ready(worker)
                else:
                    self._failures[worker.id] += 1
                    failures = self._failures[worker.id]
                    logger.warning("worker %s: probe %d failed: %s", worker.url, failures, trouble)
                    if failures >= self.settings.failure_threshold and worker.state == "ready":
                        router.pool.quarantine(worker, trouble)
                await anyio.sleep(self.settings.interval_s)
        finally:
            del self._failures[worker.id]

    async def _probe(self, worker: Worker) -> str | None:
        """What is wrong with ``worker``; None when it is well."""
        assert self._client is not None  # narrowing: open while the router serves
        try:
            with anyio.fail_after(self.settings.timeout_s):  # httpx counts each step of a request by itself
                async with self._client.stream("GET", worker.url + self.settings.endpoint) as answer:
                    pass  # the status is enough, however long the body
        except TimeoutError:
            return f"no answer within {self.settings.timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"status {answer.status_code}"
