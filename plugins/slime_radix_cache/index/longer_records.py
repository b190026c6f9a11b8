"""Responses that are recorded twice: first only the beginning, then with more tokens. No I/O."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["LongerRecords"]

T = TypeVar("T", bound=Hashable)


class LongerRecords(Generic[T]):
    """Pairs ``(part, whole)`` of records of the same response. ``whole`` begins with ``part`` and has more tokens."""

    def __init__(self) -> None:
        self._wholes: dict[T, T] = {}
        self._parts: dict[T, list[T]] = {}

    def __contains__(self, part: T) -> bool:
        """Return True if there is a longer record than ``part``."""
        return part in self._wholes

    def add(self, part: T, whole: T) -> bool:
        """Add a pair. Return False if ``part`` already has a longer record."""
        if part in self._wholes:
            return False
        self._wholes[part] = whole
        self._parts.setdefault(whole, []).append(part)
        return True

    def parts_of(self, whole: T) -> list[T]:
        """Return the records whose longer record is ``whole``."""
        return [*self._parts.get(whole, ())]

    def pairs_of(self, record: T) -> list[tuple[T, T]]:
        """Return the pairs that have ``record``."""
        longer = self._wholes.get(record)
        own = [(record, longer)] if longer is not None else []
        return [*own, *((part, record) for part in self.parts_of(record))]

    def longest(self, record: T) -> T:
        """Return the longest record of the response; ``record`` if there is no longer one."""
        while (longer := self._wholes.get(record)) is not None:
            record = longer
        return record

    def remove(self, record: T) -> None:
        """Remove ``record``. Its longer record takes its place in other pairs; without one, these are removed."""
        longer = self._wholes.pop(record, None)
        if longer is not None:
            self._drop(record, longer)
        for part in self._parts.pop(record, ()):
            del self._wholes[part]
            if longer is not None:
                self.add(part, longer)

    def _drop(self, part: T, whole: T) -> None:
        parts = self._parts[whole]
        parts.remove(part)
        if not parts:
            del self._parts[whole]
