"""Sessions that workers got lately. They come back, though they may have no request in flight at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from router_core import Worker

__all__ = ["RecentSessions"]

#: After this time a session counts 1/e. With 30 s the simulation was no better.
_DECAY_S = 10.0


class RecentSessions:
    """The sessions that each worker got, each counted as ``exp(-age / 10 s)``."""

    def __init__(self) -> None:
        #: By the id of a worker: its count, and the time at which it had that.
        self._counts: dict[str, tuple[float, float]] = {}

    def counts(self, workers: Sequence[Worker], now: float) -> list[float]:
        """Return the count of each of ``workers``."""
        known = self._counts
        return [
            count * exp((at - now) / _DECAY_S)
            for count, at in [known.get(worker.id, (0.0, now)) for worker in workers]
        ]

    def add(self, worker: Worker, workers: Sequence[Worker], now: float) -> None:
        """Count one more session of ``worker``, which is one of ``workers``."""
        if len(self._counts) > 2 * len(workers):  # some have left
            present = {each.id for each in workers}
            self._counts = {name: count for name, count in self._counts.items() if name in present}
        self._counts[worker.id] = self.counts([worker], now)[0] + 1.0, now
