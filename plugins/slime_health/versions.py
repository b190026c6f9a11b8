"""Verdicts on the versions that workers name: a worker is stale, the fleet has moved."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from router_core import HTTPError, WeightUpdate, Worker
from router_core.router import Router
from slime_health.agreement import agreed, missed_control_call, newer_than_the_fleet, others_serve, stands_in
from slime_health.judge import AS_STARTED, Fit, fit
from slime_health.questions import PROBES, Questions
from slime_health.settings import Settings
from slime_health.watch import JUDGED, UNCHECKED, WEIGHTS, Watch

if TYPE_CHECKING:
    from slime_control.contracts import QuietPeriod

__all__ = ["Versions"]

logger = logging.getLogger(__name__)

#: Seconds between two checks whether a pause or a control call is over.
_STILL_S = 0.1


class Versions:
    """Follows the versions that workers name, in probes and in answers, as docs/operations.md says.

    No change of this state has an ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(
        self, settings: Settings, watches: Mapping[Worker, Watch], turn_s: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._watches = watches
        self.questions = Questions(settings.timeout_s, watches, turn_s, self._answered)
        self._router: Router | None = None
        self._quiet_period: QuietPeriod | None = None
        self.moves = 0
        self._is_under_way = False  # a worker has moved ahead of the fleet
        self._changed_at = -math.inf
        self._left_at = -math.inf  # when a worker last ceased to serve with the fleet's version
        self._is_named = False  # a worker has named the fleet's version since the fleet moved to it
        self._is_waiting = False

    def begin(self, router: Router) -> None:
        """Start, with the router that serves."""
        self._router = self.questions.router = router
        self._quiet_period = router.components.find("quiet_period")

    def end(self) -> None:
        """Stop: the router serves no more."""
        self._router = self.questions.router = None

    def in_quiet_period(self, began: float) -> bool:
        """Return True when healthy engines may have been silent at some time since ``began``, see QuietPeriod."""
        return self._quiet_period is not None and self._quiet_period.covers(began)

    # News of workers.

    async def _answered(self, watch: Watch, said: str | None, source: str) -> bool:
        return await self.heard(watch, said, source=source, is_probed=False)

    async def heard(self, watch: Watch, said: str | None, *, source: str = PROBES, is_probed: bool) -> bool:
        """Judge the version that a worker has just reported. Returns True if the version was news.

        ``is_probed``: a probe has shown that the worker is healthy.
        """
        router = self._router
        if router is None or watch.worker not in router.pool:
            return False
        worker = watch.worker
        is_news = self._note(router, watch, said)
        self._decide(router, watch, is_news=is_news, is_probed=is_probed)
        was_unchecked = UNCHECKED in worker.holds
        router.pool.release(worker, UNCHECKED)
        # While this worker was held, it could replace no other worker, so one that is behind may still be in use.
        if (is_news or was_unchecked) and worker.said_version is not None:
            self._ask_others(worker, source)
        if self._is_under_way:
            self._set_laggards_aside(router)
        await self.settle(source)
        return is_news

    def _note(self, router: Router, watch: Watch, said: str | None) -> bool:
        worker, judge, weights = watch.worker, watch.judge, router.weights
        before = worker.said_version
        if not judge.verified:
            watch.claim = None  # the worker may be another process now
        if said is None and watch.claim is not None:
            # The worker names its version only in answers. These come in any order, so an older version is ignored.
            is_late = before is not None and fit(watch.claim, before, weights.past) == "other"
            said = before if is_late else watch.claim
        is_news = before is not None and said != before
        if not missed_control_call(worker) and (
            is_news or not judge.verified or worker.weight_version is None
        ):
            router.pool.set_version(worker, said)
            if said is not None and weights.current is None:
                weights.move(said, worker.url)  # learnt, not changed: no hook is called
        worker.said_version = said
        self._is_named |= said == weights.current
        if is_news:
            judge.vouched_at = None
            self._changed_at = asyncio.get_running_loop().time()
            if not judge.may_be_another:
                watch.changed_at = self._changed_at
            if before == weights.current:
                self._is_named = True
                if worker.state == "ready":
                    self._left_at = self._changed_at
            self._is_under_way |= self._fit(router, said) == "ahead"
        judge.may_be_another = False
        return is_news

    def _ask_others(self, worker: Worker, source: str) -> None:
        """Ask the workers with another version than ``worker``: they may have got the update, too."""
        for watch in self._watches.values():
            if watch.worker.said_version != worker.said_version:
                self.questions.ask(watch, source)

    # The weights of the fleet.

    async def settle(self, source: str = PROBES) -> None:
        """Move the fleet to the version on which its workers agree.

        Trainers may update engines directly. Updates through the router are announced by the plugin control.
        """
        router = self._router
        version = self._moved_to(router) if router is not None else None
        if router is None or version is None:
            return
        if self.in_quiet_period(anyio.current_time()):
            if not self._is_waiting:
                self._is_waiting = True
                router.tasks.start_soon(self._settle_later, source)
            return
        logger.info("the workers agree that their weights are at version %r", version)
        with suppress(HTTPError):  # an error of a plugin, which is logged
            await router.announce_weights(version, source)

    async def _settle_later(self, source: str) -> None:
        while self.in_quiet_period(anyio.current_time()):  # noqa: ASYNC110  # its end is no event
            await anyio.sleep(_STILL_S)
        self._is_waiting = False
        await self.settle(source)

    def _moved_to(self, router: Router) -> str | None:
        """Return the version to which the workers have moved; None when the fleet keeps its version."""
        weights, pool = router.weights, router.pool
        current = weights.current
        if current is None or router.weights.differ():
            return None
        if any(
            each.said_version == current and each.state == "ready" and not missed_control_call(each)
            for each in pool
        ):
            return None
        version = agreed(pool)
        fits = fit(version, current, weights.past)
        if version in (None, AS_STARTED) or fits == "same":
            return None
        if fits == "other" and not self._have_moved_since(version):
            return None
        return version

    def _have_moved_since(self, version: str | None) -> bool:
        """Return True when the workers have moved back to ``version``.

        They have if workers named the fleet's version before, and no worker in a state of ``JUDGED`` names it now. They
        also have if a worker changed to ``version`` after a worker last ceased to serve with the fleet's version. While
        a worker names the fleet's version, no change of a stale worker counts: it may catch up, or may have restarted.
        """
        is_named = self._is_named_now()
        changes = (
            each.changed_at
            for each in self._watches.values()
            if each.worker.said_version == version and (each.worker.state == "ready" or not is_named)
        )
        return max(changes, default=0.0) >= self._left_at or (self._is_named and not is_named)

    def _is_named_now(self) -> bool:
        router = self._router
        return router is not None and any(
            each.said_version == router.weights.current and each.state in JUDGED for each in router.pool
        )

    def moved(self, router: Router, update: WeightUpdate) -> None:
        """Note a move of the fleet. Unless it was only announced, ready workers' weights now count as the fleet's."""
        self.moves += 1
        self._is_under_way = False
        self._is_named = self._is_named_now()
        self._left_at = asyncio.get_running_loop().time()
        for watch in self._watches.values():
            if update.source != "announced" and watch.worker.state == "ready":
                watch.judge.vouched_at = self.moves
            if watch.worker.said_version != update.version or watch.worker.state == "stale":
                self.questions.ask(watch, update.source)

    def left(self, router: Router, worker: Worker) -> None:
        """Note that ``worker`` gets no new requests from now on."""
        if worker.said_version == router.weights.current:
            self._left_at = asyncio.get_running_loop().time()
            self._is_named = True
        for other in router.pool:
            if UNCHECKED in other.holds and not others_serve(router.pool, other):
                router.pool.release(other, UNCHECKED)  # ``other`` is the last of its type that serves
        if self._moved_to(router) is not None:
            router.tasks.start_soon(self.settle)

    # The workers in use.

    def hold_unchecked(self, router: Router, worker: Worker) -> None:
        """Hold ``worker``, which has failed, until it answers which version it has: it may be another process now.

        Asks it soon. Does nothing if it is the last of its type that serves, or if a fresh engine's weights will do.
        """
        if self._fit(router, AS_STARTED) != "same" and others_serve(router.pool, worker):
            router.pool.hold(worker, UNCHECKED, "it failed, and has not named its weights since")
            self.questions.ask(self._watches[worker])

    def _fit(self, router: Router, said: str | None) -> Fit:
        if self._settings.readmit == "any" or router.weights.differ() or router.pool.passthrough:
            return "same"
        return fit(said, router.weights.current, router.weights.past)

    def _decide(self, router: Router, watch: Watch, *, is_news: bool, is_probed: bool) -> None:
        """Decide whether a worker may be used, after it was asked for its version."""
        worker, judge = watch.worker, watch.judge
        fits = self._fit(router, worker.said_version)
        if worker.state == "ready":
            if fits == "other" and self._is_behind(router, watch, is_news=is_news):
                self._leave_behind(router, worker)
            elif fits != "ahead":
                judge.verified = True
                if is_probed:
                    judge.trust()
        elif worker.state in JUDGED and (judge.returns or (worker.state == "stale" and not judge.failures)):
            missed = missed_control_call(worker)
            if fits == "same" and not missed:
                judge.trust()
                router.hooks.weights_confirmed(worker)  # first, else the release would make it stale
                router.pool.release(worker, "health")
                self._ask_others(worker, PROBES)
            elif judge.returns:
                if not missed:
                    self._leave_behind(router, worker)
                router.pool.release(worker, "health")

    def _is_behind(self, router: Router, watch: Watch, *, is_news: bool) -> bool:
        """Return True when a worker in use, without the fleet's version, must be set aside.

        A change of its version (news), or a failure, is a sign of a restart. With such a sign, a worker counts as
        restarted if it names no version, or a fresh engine's version. A restarted worker must always be set aside. Any
        other worker stays in use in three cases: it names no version; no worker can replace it; or there is no sign of
        a restart, and its weights were taken for the fleet's at the fleet's last move or at a later registration.
        """
        judge, said = watch.judge, watch.worker.said_version
        may_have_restarted = is_news or not judge.verified
        if said in (None, AS_STARTED) and may_have_restarted:
            return True
        if said is None or (judge.vouched_at == self.moves and not may_have_restarted):
            return False
        return stands_in(router.pool, watch.worker, router.weights)

    def _set_laggards_aside(self, router: Router) -> None:
        """Hold those with old weights if half or more ready workers are ahead and no version changed for ``lag_s``."""
        if anyio.current_time() < self._changed_at + self._settings.lag_s or self._settings.readmit == "any":
            return
        newest = newer_than_the_fleet(router.pool, router.weights)
        if newest is None or router.weights.differ() or self.in_quiet_period(anyio.current_time()):
            return
        moved = [each for each in router.pool if each.said_version == newest]
        for worker in router.pool:
            said = worker.said_version
            is_named = worker.state == "ready" and said is not None
            if is_named and said != newest and others_serve(moved, worker):
                reason = f"its weights stayed at version {said!r}, others are at {newest!r}"
                self._set_aside(router, worker, reason)

    def _leave_behind(self, router: Router, worker: Worker) -> None:
        said, current = worker.said_version, router.weights.current
        if said is None:
            reason = f"it does not say which weights it has, the fleet's are at version {current!r}"
        else:
            reason = f"its weights are at version {said!r}, the fleet's at {current!r}"
        self._set_aside(router, worker, reason)

    def _set_aside(self, router: Router, worker: Worker, reason: str) -> None:
        if worker.state != "stale":
            logger.warning("worker %s is well and gets no new requests: %s", worker.url, reason)
        router.pool.hold(worker, WEIGHTS, reason, "stale")
