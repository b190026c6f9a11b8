"""Places that may get several side records, some of them in memory only. See SideRecords in the contracts."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from slime_radix_cache.demotion.note_writer import NoteWriter
from slime_radix_cache.demotion.notes import AskedAgain

__all__ = ["PlacesAskedAgain"]

#: Longest time that a request waits for a note, in seconds.
_WAIT_S = 5.0


class PlacesAskedAgain:
    """The places that this run of the router, earlier runs and other routers have noted."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._being_noted: set[bytes] = set()

    def __contains__(self, place: bytes) -> bool:
        return place in self._known

    def add(self, places: Iterable[bytes]) -> None:
        """Add ``places`` that others have noted."""
        self._known.update(places)

    def forget(self, place: bytes) -> None:
        """Forget ``place``, which has no records any more. The log keeps the note until the next start."""
        self._known.discard(place)

    async def note(self, place: bytes, writer: NoteWriter) -> None:
        """Add ``place``, and wait until ``writer`` has noted it."""
        if place not in self._known:
            self._known.add(place)
            self._being_noted.add(place)
            writer.add(AskedAgain(place))
        if place in self._being_noted:
            with anyio.move_on_after(_WAIT_S):  # even after that, this note is written before later notes
                await writer.flush()
            self._being_noted.discard(place)
