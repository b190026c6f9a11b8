"""The breakers of all workers, and what follows from them for the pool."""

from __future__ import annotations

import asyncio
import logging

from router_core import Worker
from router_core.pool import WorkerPool
from router_core.reply import Reply
from router_core.request import Request
from slime_retries.breaker import Breaker, State, Thresholds

__all__ = ["Breakers"]

logger = logging.getLogger(__name__)

#: Of its holds.
_OWNER = "circuit breaker"


class Breakers:
    """A breaker for each worker that has failed since it last answered, in ``troubled``.

    ``thresholds`` None: there never is one. An attempt is a request. Each is counted once, and only for workers that
    are ready: others get no requests anyway, or are not up yet.
    """

    def __init__(self, thresholds: Thresholds | None, pool: WorkerPool) -> None:
        self._thresholds = thresholds
        self._pool = pool
        self.troubled: dict[Worker, Breaker] = {}
        self._timers: dict[Worker, asyncio.TimerHandle] = {}
        self._failing: set[Request] = set()  # answered with a failure, not read to the end yet

    def begin(self, worker: Worker, attempt: Request) -> None:
        """``attempt`` is about to be sent to ``worker``, which has just been chosen for it."""
        breaker = self.troubled.get(worker)
        if breaker is not None:
            breaker.begin(attempt)
            self._follow(worker, breaker, breaker.state)

    def failed(self, worker: Worker, attempt: Request, how: str) -> None:
        """``worker`` did not answer ``attempt`` as it should."""
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
        """The head of ``reply`` is there. A status of 5xx is a failure; all else is judged at its end."""
        if reply.status >= 500:
            self.failed(worker, attempt, f"status {reply.status}")
            self._failing.add(attempt)
            reply.tap(_End(self, worker, attempt, reply))
        elif worker in self.troubled:
            reply.tap(_End(self, worker, attempt, reply))

    def ended(self, worker: Worker, attempt: Request, *, well: bool) -> None:
        """Nothing more comes of ``attempt``. Not ``well``: given up, or told before what went wrong."""
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
        """``worker`` starts afresh, or has left."""
        if self.troubled.pop(worker, None) is not None:
            self._stop_timer(worker)
            self._pool.release(worker, _OWNER)

    def close(self) -> None:
        """The router ends."""
        for worker in [*self.troubled]:
            self.forget(worker)

    def _follow(self, worker: Worker, breaker: Breaker, before: State, how: str = "") -> None:
        """Do what follows from what ``breaker`` was told."""
        if breaker.state != before:
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


class _End:
    """Waits for the end of a reply."""

    def __init__(self, breakers: Breakers, worker: Worker, attempt: Request, reply: Reply) -> None:
        self.troubled = breakers
        self._worker = worker
        self._attempt = attempt
        self._reply: Reply | None = reply

    def feed(self, chunk: bytes) -> None:
        """Nothing: what counts is how it ends."""

    def close(self, complete: bool) -> None:
        """Count the end. A reply that a plugin read whole counts as complete, and so does a status of 400 or more."""
        reply, self._reply = (
            self._reply,
            None,
        )  # no cycle that would keep a body until the garbage collector comes
        assert reply is not None  # narrowing: taps are closed once
        whole = complete or reply.body is not None or reply.status >= 400
        self.troubled.ended(self._worker, self._attempt, well=whole and reply.status < 500)
