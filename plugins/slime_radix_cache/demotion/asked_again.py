"""Places that may get several side records, since the same request came again. See SideRecords in the contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slime_radix_cache.demotion.note_writer import NoteWriter, NotNoted
from slime_radix_cache.demotion.notes import AskedAgain

__all__ = ["PlacesAskedAgain"]


class PlacesAskedAgain:
    """The places that this run of the router, earlier runs and other routers have noted in the store's log."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        #: Places whose notes are perhaps not written yet, oldest first, each with the number of its note.
        self._unwritten: dict[bytes, int] = {}

    def __contains__(self, place: bytes) -> bool:
        return place in self._known

    def add(self, places: Iterable[bytes]) -> None:
        """Add ``places`` that earlier runs or other routers have noted."""
        self._known.update(places)

    def forget(self, place: bytes) -> None:
        """Forget ``place``, which has no records any more.

        The log keeps the note until the next start, or for longer if the store is shared.
        """
        self._known.discard(place)
        self._unwritten.pop(place, None)

    async def note(self, place: bytes, writer: NoteWriter, is_in_log: Callable[[], bool]) -> None:
        """Give ``writer`` a note about ``place``, unless the place is noted already.

        If ``is_in_log()`` is True, the log may have a record at ``place``. Then wait until the note is written. If that
        takes too long, raise NotNoted: without the note, a later start would take that record for the only answer at
        ``place``. If the log has no such record yet, no wait is needed: the note will be written before the record.
        """
        if place not in self._known:
            self._known.add(place)
            writer.add(AskedAgain(place))
            self._unwritten[place] = writer.added
        while self._unwritten and next(iter(self._unwritten.values())) <= writer.written:
            del self._unwritten[next(iter(self._unwritten))]
        if place in self._unwritten and is_in_log() and not await writer.flushed():
            raise NotNoted("an answer to this request", "the request came again")
