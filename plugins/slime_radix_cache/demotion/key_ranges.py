"""A set of keys of records, kept as ranges of consecutive keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["KeyRanges"]


class KeyRanges:
    """Keys of records, taken as numbers. A range of consecutive keys takes the memory of one key.

    The keys of a router's records are consecutive. So two ranges of its keys have a gap between them only where records
    still exist. The memory grows with the number of gaps, and not with the number of keys in the set.
    """

    def __init__(self) -> None:
        #: The first number of each range, in ascending order; and for each range, the number after its last one.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._starts)

    def __contains__(self, key: bytes) -> bool:
        number = int.from_bytes(key, "big")
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]

    def update(self, keys: Iterable[bytes]) -> None:
        """Add ``keys``."""
        for key in keys:
            if key not in self:
                self._add(int.from_bytes(key, "big"))

    def _add(self, number: int) -> None:
        place = bisect_right(self._starts, number)
        is_behind = place > 0 and self._ends[place - 1] == number
        is_before = place < len(self._starts) and self._starts[place] == number + 1
        if is_behind and is_before:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif is_behind:
            self._ends[place - 1] = number + 1
        elif is_before:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)
