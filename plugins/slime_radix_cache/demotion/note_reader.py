"""Reader of the notes of earlier runs, which parses each note once, and may leave out damaged ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slime_radix_cache.cold_store import StoredNote
from slime_radix_cache.demotion.notes import DamagedNote, RunBegun, intact, packed, unpacked

__all__ = ["NoteReader"]


class NoteReader:
    """Reads stored notes. ``twice``: stored notes that are read twice.

    If ``salvages`` is True, damaged parts are left out, and :attr:`damage` has place and reason of each. Otherwise, a
    damaged part raises DamagedNote.
    """

    def __init__(self, *, salvages: bool = False, twice: Iterable[StoredNote] = ()) -> None:
        self.salvages = salvages
        self.damage: list[str] = []
        #: What could be read of each stored note with damage, by place.
        self.salvaged: dict[str, Sequence[Any]] = {}
        self._twice = {id(stored) for stored in twice}
        self._parsed: dict[int, Sequence[Any]] = {}

    def read(self, stored: StoredNote) -> Sequence[Any]:
        """Return the notes in ``stored``. Raises DamagedNote, see the class."""
        notes = self._parsed.pop(id(stored), None)
        if notes is not None:
            return notes
        notes = self._salvage(stored) if self.salvages else self._intact(stored)
        if id(stored) in self._twice:
            self._parsed[id(stored)] = notes
        return notes

    def is_damaged(self, stored: StoredNote) -> bool:
        """Return True if :meth:`read` has left out a damaged part of ``stored``."""
        return stored.place in self.salvaged

    def mended(self, begun: RunBegun, marks: Sequence[Any]) -> dict[str, bytes]:
        """Return new contents for the damaged stored notes, by place: the notes that could be read, and ``marks``."""
        return {place: packed([begun, *notes, *marks]) for place, notes in self.salvaged.items()}

    def _intact(self, stored: StoredNote) -> Sequence[Any]:
        if stored.damage:
            raise DamagedNote(stored.damage)
        return list(unpacked(stored.content))

    def _salvage(self, stored: StoredNote) -> Sequence[Any]:
        notes: list[Any] = []
        reasons = [stored.damage] if stored.damage else []
        for offset, some in intact(stored.content):
            if some is None:
                reasons.append(f"it is damaged at byte {offset}")
            else:
                notes += some
        if reasons:
            self.damage += [f"{stored.place}: {reason}" for reason in reasons]
            self.salvaged[stored.place] = notes
        return notes
