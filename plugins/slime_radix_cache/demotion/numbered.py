"""Segments in memory by serial, and what the store has of them. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slime_radix_cache.demotion.directory import Entry
from slime_radix_cache.demotion.entries import entry_of
from slime_radix_cache.index.segments import Response, Segment

__all__ = ["NumberedSegments", "is_beginning"]


class NumberedSegments:
    """Segments in memory. A *stored* one has a record in the store; a *saved* one also has a note in the store's log.

    ``sizes``: bytes of the records of stored segments, by serial. ``noted``: entries of saved segments, as in the log.
    """

    def __init__(self) -> None:
        self.serials: dict[Segment, int] = {}
        self.segments: dict[int, Segment] = {}
        self.sizes: dict[int, int] = {}
        self.noted: dict[int, Entry] = {}
        #: Serials of prompts that were merged with an equal prompt, each with the serial of that prompt.
        self._merged: dict[int, int] = {}
        #: How many responses of each session are not saved.
        self._unsaved: Counter[str] = Counter()

    def add(self, segment: Segment, serial: int, *, is_new: bool) -> None:
        """Add ``segment``. ``is_new``: it was recorded just now, so no store has it."""
        self.serials[segment] = segment.serial = serial
        self.segments[serial] = segment
        if is_new:
            self._count_unsaved(segment)

    def remove(self, segment: Segment) -> None:
        """Remove ``segment``."""
        serial = self.serials.pop(segment)
        del self.segments[serial]
        if self.noted.pop(serial, None) is None and isinstance(segment, Response):
            self._count_saved(segment.session)

    def _count_unsaved(self, segment: Segment) -> None:
        if isinstance(segment, Response) and segment.session is not None:
            self._unsaved[segment.session] += 1

    def _count_saved(self, session: str | None) -> None:
        if session is not None:
            self._unsaved[session] -= 1
            if not self._unsaved[session]:
                del self._unsaved[session]

    def renumber(self, segment: Segment, serial: int) -> None:
        """Give ``segment`` another ``serial``."""
        del self.segments[self.serials[segment]]
        self.serials[segment] = segment.serial = serial
        self.segments[serial] = segment

    def merge(self, segment: Segment, serial: int, other: int) -> None:
        """Give ``segment`` this ``serial``. From now on ``other``, the serial of an equal segment, also means it."""
        self.renumber(segment, serial)
        self.noted.pop(other, None)
        self._merged[other] = serial

    def renew(self, segment: Segment, serial: int) -> None:
        """Give ``segment`` a new ``serial``: the store does not have the segment any more."""
        known = self.serials[segment]
        self.sizes.pop(known, None)
        if self.noted.pop(known, None) is not None:
            self._count_unsaved(segment)
        self.renumber(segment, serial)

    def current(self, serial: int) -> int:
        """Return the serial that the segment with ``serial`` has now."""
        while serial in self._merged:
            serial = self._merged[serial]
        return serial

    def is_saved(self, segment: Segment) -> bool:
        """Return True if ``segment`` is found again after a restart."""
        return self.serials.get(segment) in self.noted

    def has_unsaved(self, session: str) -> bool:
        """Return True if a response of ``session`` would be lost if the router was killed now."""
        return session in self._unsaved

    def unsaved(self, segments: Iterable[Segment]) -> list[Segment]:
        """Return the ``segments`` that are not in the log as they are now, and unsaved segments before them."""
        found: dict[Segment, None] = {}
        here: Segment | None
        for segment in segments:
            if self.is_saved(segment):
                if self.entry_of(segment) != self.noted[self.serials[segment]]:
                    found[segment] = None
                here = segment.parent if segment in found else None  # its parent may be new and unsaved
            else:
                here = segment
            while here is not None and here in self.serials and here not in found and not self.is_saved(here):
                found[here] = None
                here = here.parent
        return list(found)

    def entry_of(self, segment: Segment) -> Entry:
        """Return the entry of ``segment``. Cost: O(its text), or O(1) if it is saved."""
        serial = self.serials[segment]
        parent = self.serials[segment.parent] if segment.parent is not None else 0
        return entry_of(segment, serial, parent, self.sizes.get(serial, 0), self.noted.get(serial))

    def save(self, entry: Entry) -> None:
        """Note that the log has ``entry``."""
        if entry.serial not in self.segments:
            return  # the segment was removed meanwhile
        if entry.serial not in self.noted:
            self._count_saved(entry.session)
        self.noted[entry.serial] = entry


def is_beginning(segment: Segment | None) -> bool:
    """Return True if ``segment`` and all before it are prompts: any session may begin with them."""
    while segment is not None and not isinstance(segment, Response):
        segment = segment.parent
    return segment is None
