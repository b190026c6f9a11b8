"""Responses that are recorded twice: first only the beginning, then with more tokens. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from slime_radix_cache.index.sessions import drop_part

__all__ = ["GrownParts"]


class GrownParts:
    """By session: serials of recorded beginnings of responses, each with the serial of a longer record."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, int]] = {}

    def add(self, session: str, part: int, whole: int) -> bool:
        """Add a pair; return False if ``part`` already has a longer record."""
        parts = self._parts.setdefault(session, {})
        if part in parts:
            return False
        parts[part] = whole
        return True

    def of(self, session: str, serial: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of ``session`` that have ``serial``."""
        for pair in self._parts.get(session, {}).items():
            if serial in pair:
                yield pair

    def remove(self, session: str, serial: int) -> None:
        """Remove ``serial``, see :func:`drop_part`."""
        drop_part(self._parts, session, serial)
