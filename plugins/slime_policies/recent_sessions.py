"""Sessions that workers got lately. Such a session probably sends more requests, even if none is in flight now."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from router_core import Worker

__all__ = ["RecentSessions"]

#: A session of this age counts as 1/e. With 30 s the figures of the simulation (benchmarks/scheduling) were no better.
_DECAY_S = 10.0
#: If a new session comes later than this after ``_since``, all counts are first brought up to now.
_LONG_S = 20 * _DECAY_S


class RecentSessions:
    """The sessions that each worker got. A session counts as ``exp(-age / 10 s)``."""

    def __init__(self) -> None:
        #: By the id of a worker: its count as of the time ``_since``. A session that comes t seconds after ``_since``
        #: adds ``exp(t / 10 s)``, which is more than 1.
        self._counts: dict[str, float] = {}
        self._since = 0.0

    def counts(self, workers: Sequence[Worker], now: float, weight: float = 1.0) -> list[float]:
        """Return the count of each of ``workers``, times ``weight``."""
        count, part = self._counts.get, weight * exp((self._since - now) / _DECAY_S)
        return [count(worker.id, 0.0) * part for worker in workers]

    def add(self, worker: Worker, workers: Sequence[Worker], now: float) -> None:
        """Count one more session of ``worker``, which is one of ``workers``."""
        # Bring all counts up to now: this keeps the numbers small, and drops workers that have left.
        if now - self._since > _LONG_S or len(self._counts) > 2 * len(workers):
            counts = zip(workers, self.counts(workers, now), strict=True)
            self._counts = {each.id: count for each, count in counts if count}
            self._since = now
        self._counts[worker.id] = self._counts.get(worker.id, 0.0) + exp((now - self._since) / _DECAY_S)
