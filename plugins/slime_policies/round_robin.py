"""Policy that chooses the workers in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker

__all__ = ["RoundRobin"]

#: The most workers whose turns are remembered. A worker that is not offered now may return.
_MOST = 4096


class RoundRobin:
    """Chooses the worker that was chosen longest ago, so that the order stays when workers come and go."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        self._turn += 1
        chosen = min(workers, key=lambda worker: self._last.get(worker.id, 0))
        if chosen.id not in self._last and len(self._last) >= _MOST:
            present = {worker.id for worker in workers}
            self._last = {name: turn for name, turn in self._last.items() if name in present}
        self._last[chosen.id] = self._turn
        return chosen
