"""Responses that are recorded several times: first only the beginning, then with more tokens. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LongerRecords"]

T = TypeVar("T", bound=Hashable)


class LongerRecords(Generic[T]):
    """The records of each response that has several, shortest first. Longer records begin with the shorter ones.

    ``length``: the length of a record. Of two records with the same length, the one that was added as the longer one
    counts as longer.
    """

    def __init__(self, length: Callable[[T], int]) -> None:
        self._length = length
        #: For each record, the list of all records of its response. These records share the list.
        self._records: dict[T, list[T]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, part: T) -> bool:
        """Return True if there is a longer record than ``part``."""
        return self.longest(part) != part

    def add(self, part: T, whole: T) -> bool:
        """Add ``part`` and ``whole`` as records of the same response. Return False if this was known."""
        shorter, longer = self.all_of(part), self.all_of(whole)
        if whole in shorter:
            return False
        together = sorted([*shorter, *longer], key=self._length)
        self._records.update(dict.fromkeys(together, together))
        return True

    def all_of(self, record: T) -> list[T]:
        """Return the records of the response, shortest first; only ``record`` if there is no other one."""
        return self._records.get(record, [record])

    def parts_of(self, whole: T) -> list[T]:
        """Return the records of the response that are shorter than ``whole``, shortest first."""
        records = self.all_of(whole)
        return records[: records.index(whole)]

    def longest(self, record: T) -> T:
        """Return the longest record of the response; ``record`` if there is no longer one."""
        return self.all_of(record)[-1]

    def remove(self, record: T) -> None:
        """Remove ``record``. The other records of the response stay together."""
        records = self._records.pop(record, None)
        if records is not None:
            records.remove(record)
            if len(records) == 1:
                del self._records[records[0]]
