"""The plugin: it measures requests, and answers scrapes."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from time import monotonic

from prometheus_client.metrics_core import Metric
from starlette.routing import BaseRoute

from router_core import WeightUpdate, Worker, hookimpl
from router_core.errors import HTTPError
from router_core.flags import add_flags
from router_core.router import Router
from router_core.types import ASGIApp
from router_core.workers import WorkerChange
from slime_metrics.counts import Counts
from slime_metrics.event_loop import LAG_BUCKETS, watch_lag
from slime_metrics.exposition import Exposition
from slime_metrics.families import request_families
from slime_metrics.fleet import Fleet
from slime_metrics.generations import generation_families
from slime_metrics.histogram import Histogram, histogram_family
from slime_metrics.labels import Labels
from slime_metrics.registry import Metrics
from slime_metrics.requests import Measured
from slime_metrics.settings import Settings
from slime_metrics.traffic import GenerationTraffic
from slime_metrics.wait_times import WaitTimes

__all__ = ["MetricsPlugin", "add_options", "make_plugin"]

provides = ("metrics",)


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Settings)


def make_plugin(options: argparse.Namespace) -> MetricsPlugin:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    return MetricsPlugin(Settings.from_options(options))


class MetricsPlugin:
    """Measures requests, and offers the component ``"metrics"`` to plugins with numbers of their own."""

    _measured: Measured  # set by ``asgi_middleware``

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._counts = Counts(settings.buckets, monotonic)
        self._lag = Histogram(LAG_BUCKETS)
        self._waits = WaitTimes(settings.buckets)
        self._exposition = Exposition(self.metrics)

    @hookimpl(tryfirst=True)  # other plugins add their metrics in their setup
    def setup(self, router: Router) -> None:
        router.components.register("metrics", self.metrics)
        router.components.register("traffic", GenerationTraffic(self._counts))
        router.components.register("wait_times", self._waits)
        self._fleet = Fleet(router)
        self._fleet.offer(self.metrics)
        self.metrics.gauge(
            "slime_router_info", "The version of the router.", lambda: {_version(): 1}, ["version"]
        )
        self.metrics.collector(self._families)

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        return [self._exposition.route()]

    @hookimpl(tryfirst=True)  # outermost, so that refused requests count, too
    def asgi_middleware(self, app: ASGIApp, router: Router) -> ASGIApp:
        self._counts.know(Labels(pattern for pattern, _ in router.own_paths))
        self._measured = Measured(app, self._counts)
        return self._measured.serve

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        self._measured.time = asyncio.get_running_loop().time
        # The times of ended requests stay in memory until ``settle`` counts them, at each measurement of the lag.
        router.tasks.start_soon(watch_lag, self._lag, self._counts.settle)
        async with AsyncExitStack() as stack:
            if self.settings.port is not None:
                await stack.enter_async_context(self._exposition.on(self.settings.host, self.settings.port))
            yield

    @hookimpl
    def attempt_failed(self, worker: Worker, error: HTTPError | None) -> None:
        self._counts.failure(worker.url, "" if error is None else error.code)

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self._fleet.updated(update)

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change == "added":
            self._counts.worker_added(worker.url)
        elif change == "removed":
            self._counts.worker_removed(worker.url)

    def _families(self) -> Iterable[Metric]:
        self._counts.tidy()
        yield from request_families(self._counts)
        yield from generation_families(self._counts)
        yield self._waits.family()
        yield histogram_family(
            "slime_event_loop_lag_seconds", "Delay of what is due on the event loop.", [], {(): self._lag}
        )


def _version() -> str:
    return version("slime-router")
