"""One loop per worker: it probes the worker (a look), judges the worker by the result, and waits.

Failed requests are judged as they come.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from router_core import Exchange, HTTPError, WeightUpdate, Worker, hookimpl
from router_core.errors import WorkerTimeout
from router_core.router import Router
from router_core.workers import WorkerChange
from slime_health.judge import Judge, Unwell, severity
from slime_health.probe import Probe
from slime_health.settings import Settings, add_options
from slime_health.versions import Versions
from slime_health.watch import JUDGED, WEIGHTS, Watch, standing
from slime_sglang.generation import GENERATION_PATHS

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["Health", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)

#: Longest time to the next probe while a verdict is near.
_SOON_S = 1.0
#: Shortest time between the starts of two looks: a thousand workers that fail at once cause no burst of probes.
_APART_S = 0.005


def make_plugin(options: argparse.Namespace) -> Health:
    """Make the plugin from the flags of the command line. Raises SettingsError."""
    return Health(Settings.from_options(options))


class Health:
    """Quarantines workers that fail, and brings them back when they are well and have the fleet's weights.

    At most one look at a worker is under way, on its own connections. A worker that hangs delays no look at another.
    No change of this state has an ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._router: Router | None = None
        self._watches: dict[Worker, Watch] = {}
        self._next_look = -math.inf
        self._versions = Versions(settings, self._watches, self._turn_s)
        #: Probes by the worker's type and the result.
        self._probes: Counter[tuple[str, str]] = Counter()

    @hookimpl
    def setup(self, router: Router) -> None:
        metrics: Metrics | None = router.components.find("metrics")
        if metrics is not None:
            metrics.counter(
                "smg_worker_health_checks_total",
                "Probes of workers.",
                lambda: self._probes,
                ["worker_type", "result"],
            )

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        self._router = None if self.settings.disabled else router
        if self._router is not None:
            self._versions.begin(router)
        try:
            yield
        finally:
            self._router = None
            self._versions.end()

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        watch = self._watches.get(worker)
        if watch is None:
            if change == "added" and self._router is not None:
                watch = self._watches[worker] = Watch(worker, self._new_judge())
                self._router.tasks.start_soon(self._attend, self._router, watch)
        elif change == "added":
            watch.judge = self._new_judge()
        elif change == "removed":
            watch.scope.cancel()
        elif change in ("quarantined", "stale"):
            watch.judge.distrust()
            watch.woken.set()
        if watch is not None and self._router is not None and change not in ("added", "readmitted"):
            self._versions.left(self._router, worker)

    @hookimpl
    def weights_confirmed(self, worker: Worker) -> None:
        if self._router is not None:
            self._router.pool.release(worker, WEIGHTS)

    @hookimpl
    def attempt_failed(self, worker: Worker, error: HTTPError | None) -> None:
        watch, router = self._watches.get(worker), self._router
        if watch is None or router is None or error is None:
            return
        watch.woken.set()
        # A deadline may be missed because of a long generation or a pause. Only probes show if the worker is well.
        if not isinstance(error, WorkerTimeout):
            now = asyncio.get_running_loop().time()
            self._failed(router, watch, error, began=now - router.settings.connect_timeout_s, now=now)

    @hookimpl
    def post_response(self, exchange: Exchange) -> None:
        """Search the answer for the version of the weights."""
        worker, reply = exchange.worker, exchange.reply
        if worker is None or reply is None or reply.status != 200 or worker.passthrough:
            return
        if exchange.request.target in GENERATION_PATHS:
            watch = self._watches.get(worker.server)
            if watch is not None:
                self._versions.questions.listen(watch, exchange, reply)

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        """Look at all workers soon: some may come back.

        The looks also learn the workers' versions. Without these versions, a later restart would not be noticed.
        """
        if self._router is not None:
            self._versions.moved(self._router, update)
        for watch in self._watches.values():
            watch.woken.set()

    def _new_judge(self) -> Judge:
        settings = self.settings
        return Judge(settings.failure_threshold, settings.success_threshold, vouched_at=self._versions.moves)

    # One worker.

    async def _attend(self, router: Router, watch: Watch) -> None:
        interval_s = self.settings.interval_s
        try:
            with watch.scope:
                await self._wait(watch, random.uniform(0, interval_s))  # probes are spread
                while True:
                    watch.woken = anyio.Event()
                    if watch.worker.state in JUDGED:
                        await anyio.sleep(self._turn_s())
                        await self._look(router, watch)
                    await self._wait(watch, interval_s * random.uniform(0.9, 1.1))
        finally:
            del self._watches[watch.worker]

    async def _wait(self, watch: Watch, interval_s: float) -> None:
        """Wait until the next look is due: soon when there is news or a verdict is near."""
        if not watch.judge.undecided:
            with anyio.move_on_after(interval_s):
                await watch.woken.wait()
            if not watch.woken.is_set():
                return
        if watch.worker.state == "ready" and not watch.judge.verified:
            self._versions.questions.ask(watch)
        await anyio.sleep(min(_SOON_S, self.settings.interval_s) * random.uniform(0.5, 1))

    def _turn_s(self) -> float:
        """Reserve the next time to begin a look. Returns the seconds until then."""
        now = anyio.current_time()
        turn = max(now, self._next_look)
        self._next_look = turn + _APART_S
        return turn - now

    async def _look(self, router: Router, watch: Watch) -> None:
        worker, judge = watch.worker, watch.judge
        began = anyio.current_time()
        try:
            with Probe(router, worker, self.settings.timeout_s) as probe:
                await probe.is_well(self.settings.endpoint)
                before = standing(router, worker)
                said = await probe.weight_version()
        except HTTPError as error:
            self._probes[worker.worker_type, "failure"] += 1
            if watch.judge is judge and not self._excused(error, began):
                self._failed(router, watch, error, began=began, now=anyio.current_time())
            return
        self._probes[worker.worker_type, "success"] += 1
        if watch.judge is not judge or standing(router, worker) != before:
            watch.woken.set()  # the answer may be older than what is known now
            return
        judge.passed()
        await self._versions.heard(watch, said, is_probed=True)

    def _excused(self, error: HTTPError, began: float) -> bool:
        """Return True when a pause or a control call may be the cause of ``error`` in a probe begun at ``began``."""
        return isinstance(error, WorkerTimeout | Unwell) and self._versions.in_quiet_period(began)

    # Verdicts.

    def _failed(self, router: Router, watch: Watch, error: HTTPError, *, began: float, now: float) -> None:
        worker, judge = watch.worker, watch.judge
        if worker.state not in JUDGED:
            return
        logger.debug("worker %s: %s", worker.url, error)
        proof = severity(error)
        if judge.failed(proof, began=began, now=now, heard=router.proxy.heard(worker)):
            if worker.state != "quarantined":
                logger.warning(
                    "worker %s gets no new requests after %d failures in a row, the last: %s",
                    worker.url, judge.failures, error,
                )  # fmt: skip
            router.pool.hold(worker, "health", str(error), "quarantined")
        elif proof in ("firm", "soft") and worker.state == "ready":
            self._versions.hold_unchecked(router, worker)
