"""One loop per worker: look at it, judge, wait. Failed requests are judged as they come."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from router_core import HTTPError, Worker, hookimpl
from router_core.errors import WorkerTimeout
from router_core.hookspecs import WorkerChange
from router_core.router import Router
from router_core.types import Stillness
from slime_health.judge import Judge, Unwell, fit, weight
from slime_health.probe import Probe
from slime_health.settings import Settings, add_options

__all__ = ["Health", "add_options", "make_plugin"]

logger = logging.getLogger(__name__)

#: Whose states are this plugin's to change: not those who are awaited, nor those who leave.
_JUDGED = ("ready", "quarantined", "stale")
#: Longest time to the next probe while a verdict is near.
_SOON_S = 1.0
#: Two looks never begin closer together: a thousand workers that fail at once are no storm.
_APART_S = 0.005


def make_plugin(options: argparse.Namespace) -> Health:
    """The plugin with the flags of the command line. Raises SettingsError."""
    return Health(Settings.from_options(options))


class _Watch:
    """A worker that is attended. ``woken``: there is news, so the next look is due soon."""

    __slots__ = ("judge", "scope", "woken", "worker")

    def __init__(self, worker: Worker, judge: Judge) -> None:
        self.worker = worker
        self.judge = judge
        self.scope = anyio.CancelScope()
        self.woken = anyio.Event()


class Health:
    """Quarantines workers that fail, and brings them back when they are well and have the fleet's weights.

    At most one look at a worker is under way, on a connection of its own, so one that hangs holds back nobody else's.
    States change only by functions without ``await`` in between.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._router: Router | None = None
        self._watches: dict[Worker, _Watch] = {}
        self._next_look = -math.inf
        self._stillness: Stillness | None = None

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        self._router = router if self.settings.enabled else None
        self._stillness = router.components.get("stillness") if "stillness" in router.components else None
        try:
            yield
        finally:
            self._router = None

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        watch = self._watches.get(worker)
        if watch is None:
            if change == "added" and self._router is not None:
                watch = self._watches[worker] = _Watch(worker, self._new_judge())
                self._router.tasks.start_soon(self._attend, self._router, watch)
        elif change == "added":
            watch.judge = self._new_judge()
        elif change == "removed":
            watch.scope.cancel()
        elif change in ("quarantined", "stale"):
            watch.judge.distrust()
            watch.woken.set()

    @hookimpl
    def attempt_failed(self, worker: Worker, error: HTTPError | None) -> None:
        watch, router = self._watches.get(worker), self._router
        if watch is None or router is None or error is None:
            return
        watch.woken.set()
        # A deadline that passed says something about the request, a long one or one that met a pause; probes
        # say whether the worker lives.
        if not isinstance(error, WorkerTimeout):
            now = asyncio.get_running_loop().time()
            self._failed(router, watch, error, began=now - router.settings.connect_timeout_s, now=now)

    @hookimpl
    async def on_weight_update(self) -> None:
        """Some may come back now; of the others it is to be known what they say before they may be started anew."""
        self._look_soon()

    def _look_soon(self) -> None:
        """At all of them."""
        for watch in self._watches.values():
            watch.woken.set()

    def _new_judge(self) -> Judge:
        return Judge(self.settings.failure_threshold, self.settings.success_threshold)

    # One worker.

    async def _attend(self, router: Router, watch: _Watch) -> None:
        interval_s = self.settings.interval_s
        try:
            with watch.scope:
                await self._rest(watch, random.uniform(0, interval_s))  # workers are not probed in step
                while True:
                    watch.woken = anyio.Event()
                    if watch.worker.state in _JUDGED:
                        await anyio.sleep(self._turn_s())
                        await self._look(router, watch)
                    await self._rest(watch, interval_s * random.uniform(0.9, 1.1))
        finally:
            del self._watches[watch.worker]

    async def _rest(self, watch: _Watch, interval_s: float) -> None:
        """Until the next look is due, which is soon when there is news or a verdict is near."""
        if not watch.judge.undecided:
            with anyio.move_on_after(interval_s):
                await watch.woken.wait()
            if not watch.woken.is_set():
                return
        await anyio.sleep(min(_SOON_S, self.settings.interval_s) * random.uniform(0.5, 1))

    def _turn_s(self) -> float:
        """Seconds to wait for one's turn to begin a look."""
        now = anyio.current_time()
        turn = max(now, self._next_look)
        self._next_look = turn + _APART_S
        return turn - now

    async def _look(self, router: Router, watch: _Watch) -> None:
        worker, judge = watch.worker, watch.judge
        began = anyio.current_time()
        try:
            with Probe(router, worker, self.settings.timeout_s) as probe:
                await probe.is_well(self.settings.endpoint)
                before = _standing(router, worker)
                said = await probe.weight_version()
        except HTTPError as error:
            if watch.judge is judge and not self._excused(error, began):
                self._failed(router, watch, error, began=began, now=anyio.current_time())
            return
        if watch.judge is not judge or _standing(router, worker) != before:
            watch.woken.set()  # what was asked may be older than what is known now
            return
        judge.passed()
        if said is not None and self._all_say(router, watch, said):
            logger.info("all workers in use say that their weights are at version %r", said)
            with suppress(HTTPError):  # of a plugin's, and it is in the log
                await router.announce_weights(said, "the workers")
            return  # and all are looked at again
        self._weigh(router, watch, said)

    def _excused(self, error: HTTPError, began: float) -> bool:
        """Whether engines that are well may have said nothing to a probe that began at ``began``."""
        still = self._stillness
        return isinstance(error, WorkerTimeout | Unwell) and still is not None and still.excuses(began)

    def _all_say(self, router: Router, watch: _Watch, said: str) -> bool:
        """Whether all in use say what ``watch.worker`` has ``said``: the fleet has moved, and nobody has announced it.

        Trainers update engines directly, and need not tell the router. What comes through it control announces.
        """
        weights, still = router.weights, self._stillness
        if watch.worker.torn or router.several_models:
            return False
        if fit(said, weights.current, weights.ordered) != "ahead":
            return False
        if still is not None and still.excuses(anyio.current_time()):
            return False
        others = (each for each in self._watches.values() if each is not watch)
        return all(each.judge.said == said for each in others if each.worker.state == "ready")

    # Verdicts.

    def _failed(self, router: Router, watch: _Watch, error: HTTPError, *, began: float, now: float) -> None:
        worker, judge = watch.worker, watch.judge
        if worker.state not in _JUDGED:
            return
        logger.debug("worker %s: %s", worker.url, error)
        if judge.failed(weight(error), began=began, now=now, heard=router.proxy.heard(worker)):
            if worker.state != "quarantined":
                logger.warning(
                    "worker %s gets no new requests after %d failures in a row, the last: %s",
                    worker.url, judge.failures, error,
                )  # fmt: skip
            router.pool.quarantine(worker, str(error))

    def _weigh(self, router: Router, watch: _Watch, said: str | None) -> None:
        """``watch.worker`` is well and ``said`` which weights it has: may it be used?"""
        worker, judge, weights = watch.worker, watch.judge, router.weights
        news = said != judge.said and judge.said is not None
        if not worker.torn and (news or not judge.verified):
            worker.weight_version = said
            if said is not None and weights.current is None:
                weights.move(said, worker.url)  # learnt, not changed: no hook
        judge.said = said
        matters = self.settings.readmit == "matching" and not router.several_models
        fits = fit(said, weights.current, weights.ordered) if matters else "same"
        if worker.state not in _JUDGED:
            return
        if worker.state == "ready":
            if judge.verified and not news:
                return
            if fits == "same":
                judge.trust()
            elif fits == "other":
                self._leave_behind(router, worker, said)
            elif news:  # perhaps they all have it
                self._look_soon()
        elif judge.returns:
            if worker.torn or fits != "same":
                self._leave_behind(router, worker, said)
            else:
                judge.trust()
                router.pool.ready(worker)

    def _leave_behind(self, router: Router, worker: Worker, said: str | None) -> None:
        if worker.torn:
            if worker.state == "stale":
                return  # who set it aside has said why
            reason = "a control call failed there, so what it says about itself is no proof"
        elif said is None:
            reason = (
                f"it does not say which weights it has, the fleet's are at version {router.weights.current!r}"
            )
        else:
            reason = f"its weights are at version {said!r}, the fleet's at {router.weights.current!r}"
        if worker.state != "stale":
            logger.warning("worker %s is well and gets no new requests: %s", worker.url, reason)
        router.pool.stale(worker, reason)


def _standing(router: Router, worker: Worker) -> tuple[object, ...]:
    """What a question to ``worker`` must not outlive."""
    return worker.state, worker.torn, worker.weight_version, router.weights.current
