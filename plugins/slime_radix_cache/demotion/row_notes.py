"""Notes about rows (values that engines send for each token) in the store. Another plugin owns the rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from slime_radix_cache.cold_store import ColdStore
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.notes import DroppedRows, Rows, WrongNote
from slime_radix_cache.demotion.saving import SegmentSaver
from slime_radix_cache.index.segments import Segment

if TYPE_CHECKING:
    from slime_radix_cache.contracts import TokenRows

__all__ = ["RowNotes"]


class RowNotes:
    """Writes the notes of the component ``"token_rows"``, and gives it the notes of earlier runs and other routers.

    ``past``: the notes of earlier runs. Here a response is known by its serial; in notes, by the key of its record.
    ``saver`` writes the notes, and counts those that the component cannot read. The rows of such a note stay unknown.
    """

    def __init__(
        self, store: ColdStore, demotion: Demotion, saver: SegmentSaver, past: Iterable[Rows]
    ) -> None:
        self._store = store
        self._demotion = demotion
        self._writer = saver.writer
        self._past = list(past)
        self._failed = saver.failed
        self._owner: TokenRows | None = None

    def connect(self, owner: TokenRows) -> None:
        """Give ``owner`` the notes of earlier runs, and write the notes that it adds from now on."""
        self._owner = owner
        for note in self._past:
            self.found(note)
        self._past.clear()
        owner.note_in(self)

    def add(
        self, response: Hashable, name: str, content: tuple[Any, ...], records: Sequence[tuple[bytes, int]]
    ) -> None:
        """See slime_radix_cache.contracts.RowNotes."""
        assert response is None or isinstance(response, int)  # narrowing: with a store, it is a serial
        key = self._demotion.runs.key(response) if response is not None else b""
        self._writer.add(Rows(key, name, content, tuple(records)))

    def drop(self, keys: Sequence[bytes]) -> None:
        """See slime_radix_cache.contracts.RowNotes."""
        self._writer.add(DroppedRows(tuple(keys)))

    def found(self, note: Rows) -> None:
        """Give ``note`` to the owner of the rows, unless the response of the rows is gone for good."""
        if self._owner is None:
            return
        if not note.key:
            self._restore(self._owner, None, note)
            return
        demotion, runs = self._demotion, self._demotion.runs
        runs.add(note.key)
        serial = runs.serial(note.key)
        # The note about a segment of another run may come after the note about its rows. So such a segment is gone only
        # if it is in ``dropped``. A segment of this run is gone if it is not known.
        if serial not in demotion.dropped and (demotion.has(serial) or not runs.is_own(serial)):
            self._restore(self._owner, serial, note)

    def _restore(self, owner: TokenRows, serial: int | None, note: Rows) -> None:
        try:
            owner.restore(serial, note.name, note.content, note.records)
        except Exception as error:  # the owner may be of another version than the writer of the note
            self._failed(
                "rows", WrongNote(f"rows {note.name} stay unknown, their note cannot be read: {error!r}")
            )

    async def save(self) -> None:
        """Put all rows into the store, and note where they are. Raises the owner's errors."""
        if self._owner is not None:
            await self._owner.save()
            await self._writer.flush()

    async def save_of(self, segments: Iterable[Segment]) -> None:
        """Put the rows of ``segments`` and their ancestors, as far as these are saved, into a store that keeps notes.

        Rows that the store does not take in time stay in memory. When the call returns, the notes about all other rows
        are written. O(all these segments).
        """
        if self._owner is None or not self._store.keeps_notes:
            return
        memory, found = self._demotion.memory, dict[Segment, None]()
        here: Segment | None
        for here in segments:
            while here is not None and here not in found:
                found[here] = None
                here = here.parent
        await self._owner.save_of([memory.serials[one] for one in found if memory.is_saved(one)])
        await self._writer.flush()
