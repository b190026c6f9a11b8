"""Horizons of workers. The policy numbers its choices, and a horizon is the number of a choice.

A prefix counts as evicted from a worker if no choice after the worker's horizon used the prefix.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Horizons"]


class Horizons:
    """The horizon of each worker, by the worker's bit. A worker may have no horizon."""

    __slots__ = ("_by_bit", "_evicted", "_sorted", "latest")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all horizons."""
        self._by_bit: dict[int, int] = {}
        self._sorted: list[int] = []
        #: For each place in the sorted horizons, the bits of all workers from there on; 0 after the last place.
        self._evicted: list[int] = [0]
        self.latest = 0

    def move(self, bit: int, horizon: int) -> None:
        """Move the horizon of a worker to ``horizon``, but never back. O(workers * log workers)."""
        if horizon > self._by_bit.get(bit, 0):
            self._by_bit[bit] = horizon
            self._arrange()

    def drop(self, bit: int) -> None:
        """Forget the horizon of a worker."""
        if self._by_bit.pop(bit, None) is not None:
            self._arrange()

    def evicted_by(self, used: int) -> int:
        """Return the bits of the workers that count as having evicted a prefix last used by the choice ``used``."""
        return self._evicted[bisect_left(self._sorted, used)] if used <= self.latest else 0

    def _arrange(self) -> None:
        ordered = sorted((horizon, bit) for bit, horizon in self._by_bit.items())
        self._sorted = [horizon for horizon, _ in ordered]
        self._evicted = [0]
        for _, bit in reversed(ordered):
            self._evicted.append(self._evicted[-1] | bit)
        self._evicted.reverse()
        self.latest = self._sorted[-1] if ordered else 0
