"""The circuit breakers of all workers, and their effects on the pool."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import get_args

from router_core import Worker
from router_core.pool import WorkerPool
from router_core.reply import Reply
from router_core.request import Request
from slime_retries.breaker import Breaker, State, Thresholds

__all__ = ["Breakers"]

logger = logging.getLogger(__name__)

#: Owner of the holds.
_OWNER = "circuit breaker"
_STATES: tuple[State, ...] = get_args(State)


class Breakers:
    """The breakers of the workers whose last failures still count; ``troubled`` has them by worker.

    ``thresholds`` None: no breakers. An attempt is a request, and counts once. A worker gets a breaker only while it is
    ready: any other worker gets no requests, or is not up yet.
    """

    def __init__(self, thresholds: Thresholds | None, pool: WorkerPool) -> None:
        self._thresholds = thresholds
        self._pool = pool
        self.troubled: dict[Worker, Breaker] = {}
        self._timers: dict[Worker, asyncio.TimerHandle] = {}
        #: Number of changes of state by the states before and after, in the words of the SGLang gateway.
        self.transitions: Counter[tuple[str, str]] = Counter()
        self._failing: set[Request] = set()  # answered with a failure, not read to the end yet

    def begin(self, worker: Worker, attempt: Request) -> None:
        """Note that ``attempt`` is about to be sent to ``worker``, which has just been chosen for it."""
        breaker = self.troubled.get(worker)
        if breaker is not None:
            breaker.begin(attempt)
            self._follow(worker, breaker, breaker.state)

    def failed(self, worker: Worker, attempt: Request, how: str) -> None:
        """Note that ``worker`` failed ``attempt``."""
        if self._thresholds is None or attempt in self._failing:
            return
        breaker = self.troubled.get(worker)
        if breaker is None:
            if worker.state != "ready" or worker not in self._pool:
                return
            breaker = self.troubled[worker] = Breaker(self._thresholds, asyncio.get_running_loop().time)
        before = breaker.state
        breaker.failed(attempt)
        self._follow(worker, breaker, before, how)

    def answered(self, worker: Worker, attempt: Request, reply: Reply) -> None:
        """Note the head of ``reply``. A 5xx is a failure; other replies count at their end if there is a breaker."""
        if reply.status >= 500:
            self.failed(worker, attempt, f"status {reply.status}")
            self._failing.add(attempt)
            reply.tap(_End(self, worker, attempt, reply))
        elif worker in self.troubled:
            reply.tap(_End(self, worker, attempt, reply))

    def ended(self, worker: Worker, attempt: Request, *, well: bool) -> None:
        """Note the end of ``attempt``. ``well`` is False if it was given up, or its failure was counted before."""
        self._failing.discard(attempt)
        breaker = self.troubled.get(worker)
        if breaker is None:
            return
        before = breaker.state
        if well:
            breaker.succeeded(attempt)
        else:
            breaker.gave_up(attempt)
        self._follow(worker, breaker, before)
        if breaker.untroubled:
            del self.troubled[worker]

    def forget(self, worker: Worker) -> None:
        """Drop the breaker of ``worker``, which was registered, readmitted or removed."""
        if self.troubled.pop(worker, None) is not None:
            self._stop_timer(worker)
            self._pool.release(worker, _OWNER)

    def close(self) -> None:
        """Drop all breakers, since the router is shutting down."""
        for worker in [*self.troubled]:
            self.forget(worker)

    def codes(self) -> dict[str, int]:
        """Return the state of each worker's breaker, as the number that the SGLang gateway has for the state."""
        return {worker.url: self._code(worker) for worker in self._pool}

    def _code(self, worker: Worker) -> int:
        breaker = self.troubled.get(worker)
        return 0 if breaker is None else _STATES.index(breaker.state)

    def _follow(self, worker: Worker, breaker: Breaker, before: State, how: str = "") -> None:
        """Set the timer and the hold by the state of ``breaker``. Log the state if it differs from ``before``."""
        if breaker.state != before:
            self.transitions[_named(before), _named(breaker.state)] += 1
            self._stop_timer(worker)
            if breaker.state == "open":
                assert self._thresholds is not None  # narrowing: there is a breaker
                wait_s = self._thresholds.timeout_s
                loop = asyncio.get_running_loop()
                self._timers[worker] = loop.call_later(wait_s, self._wait_over, worker)
                logger.warning("worker %s: circuit breaker open for %g s: %s", worker.url, wait_s, how)
            else:
                logger.info("worker %s: circuit breaker %s", worker.url, breaker.state)
        if breaker.admits:
            self._pool.release(worker, _OWNER)
        else:
            self._pool.hold(worker, _OWNER, f"circuit breaker {breaker.state}")

    def _wait_over(self, worker: Worker) -> None:
        breaker = self.troubled[worker]
        before = breaker.state
        breaker.wait_over()
        self._follow(worker, breaker, before)

    def _stop_timer(self, worker: Worker) -> None:
        timer = self._timers.pop(worker, None)
        if timer is not None:
            timer.cancel()


def _named(state: State) -> str:
    return state.replace("-", "_")


class _End:
    """A tap that counts a reply at its end."""

    def __init__(self, breakers: Breakers, worker: Worker, attempt: Request, reply: Reply) -> None:
        self._breakers = breakers
        self._worker = worker
        self._attempt = attempt
        self._reply: Reply | None = reply

    def feed(self, chunk: bytes) -> None:
        """Ignore the bytes: only the end counts."""

    def close(self, complete: bool) -> None:
        """Count the end. A reply is also complete if a plugin has read all of it, or if its status is 400 or more."""
        # The reference is dropped: a cycle would keep the body until garbage collection.
        reply, self._reply = self._reply, None
        assert reply is not None  # narrowing: taps are closed once
        whole = complete or reply.body is not None or reply.status >= 400
        self._breakers.ended(self._worker, self._attempt, well=whole and reply.status < 500)
