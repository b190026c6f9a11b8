"""Policy that places sessions on a hash ring."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.ring import WorkerRing

__all__ = ["ConsistentHashing"]


class ConsistentHashing:
    """Chooses the worker to which the session, or routing key, belongs on a :class:`slime_policies.ring.WorkerRing`.

    When that worker is not offered (unhealthy, held, already tried), the next worker on the ring is chosen. Requests
    without a session go to the worker with the fewest requests in flight.
    """

    def __init__(self) -> None:
        self._ring = WorkerRing()

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        session = exchange.session
        if session is None:
            return least_in_flight(workers)
        return self._ring.owner(session.encode("utf-8", "surrogatepass"), workers)

    def forget(self, worker: Worker) -> None:
        self._ring.forget(worker)

    def forget_all(self) -> None:
        """Do nothing: the workers of sessions do not depend on what the workers' caches hold."""
