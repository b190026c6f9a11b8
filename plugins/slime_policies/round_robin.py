"""Policy that chooses the workers in turn."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

from router_core import Exchange, Worker

__all__ = ["RoundRobin"]


class RoundRobin:
    """Chooses the worker that was chosen longest ago, so that the order stays when workers come and go."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        self._turn += 1
        chosen = min(workers, key=lambda worker: self._last.get(worker.id, 0))
        if chosen.id not in self._last:  # forgotten with the worker: one that is not offered may return
            finalize(chosen, self._last.pop, chosen.id)
        self._last[chosen.id] = self._turn
        return chosen
