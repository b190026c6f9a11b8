"""Policy that assigns each new session to a worker."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.settings import Settings

__all__ = ["Manual"]

_MAX_SESSIONS = 1 << 18


class Manual:
    """Assigns a new session to a worker by ``--assignment-mode``. The core then keeps the session there.

    ======================= ============================================================
    ``random`` (default)    any worker
    ``min_load``            the worker with the fewest requests in flight
    ``min_group``           the worker to which the fewest sessions are assigned
    ======================= ============================================================

    Requests without a session go to any worker.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._mode = settings.assignment_mode
        self._max_idle_secs = settings.max_idle_secs
        self._clock = clock
        self._assigned: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._groups: Counter[str] = Counter()

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        session = exchange.session
        if session is None or self._mode == "random":
            return random.choice(workers)
        if self._mode == "min_load":
            return least_in_flight(workers)
        return self._assign(session, workers)

    def _assign(self, session: str, workers: Sequence[Worker]) -> Worker:
        now = self._clock()
        self._unassign(session)  # a known session gets here when its worker cannot serve this request
        while self._assigned:
            oldest, (_, since) = next(iter(self._assigned.items()))
            if now - since <= self._max_idle_secs and len(self._assigned) < _MAX_SESSIONS:
                break
            self._unassign(oldest)
        smallest = min(self._groups[worker.id] for worker in workers)
        chosen = random.choice([worker for worker in workers if self._groups[worker.id] == smallest])
        self._assigned[session] = (chosen.id, now)
        self._groups[chosen.id] += 1
        return chosen

    def _unassign(self, session: str) -> None:
        if session in self._assigned:
            worker_id, _ = self._assigned.pop(session)
            self._groups[worker_id] -= 1
            if not self._groups[worker_id]:
                del self._groups[worker_id]  # else workers that have left would take memory for ever
