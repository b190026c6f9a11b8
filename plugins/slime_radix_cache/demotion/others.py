"""Segments that other routers demote to the same store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from slime_radix_cache.cold_store import ColdStore, StoredNote
from slime_radix_cache.demotion.copying import Copies, NotCopied
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.entry_notes import entry_of_note
from slime_radix_cache.demotion.notes import (
    AskedAgain,
    Begun,
    Copying,
    Demoted,
    Dropped,
    DroppedRows,
    Ended,
    Grew,
    Lost,
    Rows,
    RunBegun,
    Settled,
    SideRecord,
    Unanswered,
    WrongNote,
    unpacked,
)
from slime_radix_cache.demotion.past import Past, mark_lost
from slime_radix_cache.demotion.row_notes import RowNotes
from slime_radix_cache.demotion.side_records import SideRecords
from slime_radix_cache.index.segments import Segment
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["OtherRouters"]

#: Seconds between two looks at the notes of other routers.
_EVERY_S = 1.0


class OtherRouters:
    """Follows the notes that other routers write to ``store``. Without a shared store all methods return at once.

    ``begun``: the first note of this run, with its format and tokenizer; runs with another first note are ignored.
    ``failed`` is called with each error. The store calls :meth:`was_deleted` for records that are missing.
    """

    def __init__(
        self, store: ColdStore, trajectories: Trajectories, demotion: Demotion, begun: RunBegun,
        rows: RowNotes, side: SideRecords, failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._store = store
        store.was_deleted = self.was_deleted
        self._trajectories = trajectories
        self._demotion = demotion
        self._begun = begun
        self._rows = rows
        self._side = side
        self._failed = failed
        self._ignored: set[bytes] = set()
        #: Segments whose parent is not known yet.
        self._waiting: dict[bytes, Demoted] = {}
        self._copies = Copies()
        #: Segments that a copy may bring, each with the run of the note. Their sessions are open in the copy's run.
        self._hidden: dict[bytes, tuple[bytes, Demoted]] = {}
        self._lock = anyio.Lock()
        self._wrong: WrongNote | None = None
        #: Numbers of the latest reading that has begun, and of the latest that has ended. ``_error``: the error of the
        #: latest reading that has ended.
        self._begun_reading = self._ended_reading = 0
        self._error: Exception | None = None
        #: Open sessions, each with the runs in which it is open, and with the keys of its segments in ``_waiting``.
        #: A session stays open until neither a run nor a key is left.
        self.open: dict[str, set[bytes]] = {}

    def restore(self, past: Past) -> None:
        """Go on after the notes in ``past``."""
        self.open = self._trajectories.losses.open = past.open
        self._copies, self._waiting = past.copies, past.waiting
        self._side.is_coming = self._copies.may_bring
        self._hidden = {key: (b"", note) for key, note in past.hidden.items()}
        self._add_waiting()

    async def run(self) -> None:
        """Follow the notes until cancelled."""
        while self._store.is_shared:
            await anyio.sleep(_EVERY_S)
            try:
                await self.look()
            except Exception as error:
                self._failed(error)

    async def look(self) -> None:
        """Read the notes written until now. Raises the store's errors. After a damaged note, always raises WrongNote.

        Calls during a reading share the next reading, since a reading of a remote store takes long.
        """
        if not self._store.is_shared:
            return
        begun = self._begun_reading
        async with self._lock:  # notes are taken in order
            if self._ended_reading <= begun:
                self._begun_reading += 1
                self._error = await self._read()
                self._ended_reading = self._begun_reading
            if self._error is not None:
                raise self._error

    async def was_deleted(self, key: bytes) -> bool:
        """Return True if a router has dropped the record of ``key``, according to the notes written until now.

        A router writes this note before it deletes the record. Raises what :meth:`look` raises, and NotCopied if the
        record may still come.
        """
        await self.look()
        demotion, runs = self._demotion, self._demotion.runs
        if key in demotion.dropped_rows or (runs.knows(key) and runs.serial(key) in demotion.dropped):
            return True
        if self._copies.may_bring(key):
            raise NotCopied(key)
        return False

    def forget(self, session: str) -> None:
        """Drop the segments of ``session`` that wait for their parent or for a copy."""
        hidden = (note for _, note in self._hidden.values())
        for key in [note.key for note in (*self._waiting.values(), *hidden) if note.session == session]:
            self._drop(key)
            self._demotion.forget(self._demotion.runs.serial(key))

    async def _read(self) -> Exception | None:
        """Read the notes written until now. Returns an error instead of raising it, or None."""
        if self._wrong is not None:
            return self._wrong
        try:
            for stored in await self._store.news():
                self._take_all(stored)
        except Exception as error:
            return error
        self._add_waiting()
        return None

    def _take_all(self, stored: StoredNote) -> None:
        notes = unpacked(stored.content)
        try:
            while stored.run not in self._ignored and (note := next(notes, None)) is not None:
                self._take(note, stored.run)
        except WrongNote as error:
            self._wrong = WrongNote(f"{stored.place}: {error}")
            raise self._wrong from None

    def _take(self, note: Any, run: bytes) -> None:
        losses = self._trajectories.losses
        match note:
            case RunBegun():
                if note == self._begun:
                    losses.texts.add(b"")  # the run of this note may lose samples without a session
                else:
                    self._ignored.add(run)
            case Demoted():
                self._learn(note, run)
            case Dropped():
                self._drop(note.key)
            case Grew():
                self._grow(note)
            case Begun():
                self.open.setdefault(note.session, set()).add(run)
            case Settled():
                self._settle(note.session, run)
            case Ended():
                self._end(run)
            case Copying():
                self._copies.begin(run, note)
                for replaced in note.replaces:
                    self._end(replaced)
            case Rows():
                self._rows.found(note)
            case DroppedRows():
                self._demotion.dropped_rows.update(note.keys)
            case Lost():
                mark_lost(note, losses)
            case Unanswered():
                losses.sessions.add(note.session)
            case SideRecord() | AskedAgain():
                self._side.learn(note)

    def _learn(self, note: Demoted, run: bytes) -> None:
        if not self._copies.may_bring(note.key):
            self._waiting[note.key] = note
            return
        known, _ = self._hidden.get(note.key, (run, note))
        if run not in self._copies or known in self._copies:  # else the known note is the later one
            self._hidden[note.key] = run, note

    def _drop(self, key: bytes) -> None:
        self._hidden.pop(key, None)
        note = self._waiting.pop(key, None)
        if note is not None and note.session is not None:
            self._settle(note.session, key)
        self._demotion.runs.add(key)
        serial = self._demotion.runs.serial(key)
        self._demotion.dropped.add(serial)
        self._side.remove(key)
        if serial in self._demotion.directory:
            self._demotion.lose(serial)
        elif (segment := self._demotion.memory.segments.get(serial)) is not None:
            self._take_over(segment, serial)
        else:
            self._demotion.grown.serials.remove(serial)
            self._demotion.gone(serial)  # rows of the segment may be known

    def _take_over(self, segment: Segment, serial: int) -> None:
        """Keep ``segment``, whose record another router has dropped, if something here continues it. Else evict it."""
        demotion = self._demotion
        if not self._trajectories.is_needed(segment):
            self._trajectories.evict(segment, "not_in_store")
            return
        new, children = demotion.runs.next_serial(), demotion.directory.children(serial)
        demotion.directory.adopt(serial, new)
        demotion.memory.renew(segment, new)
        demotion.grown.renew(serial, new)
        for child in filter(None, map(demotion.directory.get, children)):
            demotion.on_change(child)
        demotion.gone(serial)

    def _grow(self, note: Grew) -> None:
        runs = self._demotion.runs
        for key in (note.part, note.whole):
            runs.add(key)
        self._demotion.grown.learn(runs.serial(note.part), runs.serial(note.whole))

    def _end(self, run: bytes) -> None:
        """End the copy of ``run``, and settle its sessions: the shortened log of an ended run has no Settled notes."""
        self._copies.end(run)
        for session in list(self.open):
            self._settle(session, run)
        for key in [key for key in self._hidden if not self._copies.may_bring(key)]:
            _, self._waiting[key] = self._hidden.pop(key)

    def _settle(self, session: str, run: bytes) -> None:
        runs = self.open.get(session, set())
        runs.discard(run)
        if not runs:
            self.open.pop(session, None)

    def _add_waiting(self) -> None:
        """Add the segments whose parents are known by now. The sessions of the other segments stay open."""
        while added := [key for key, note in self._waiting.items() if self._add(note)]:
            for key in added:
                note = self._waiting.pop(key)
                if note.session is not None:
                    self._settle(note.session, key)
        for key, note in self._waiting.items():
            if note.session is not None:
                self.open.setdefault(note.session, set()).add(key)

    def _add(self, note: Demoted) -> bool:
        """Add the segment of ``note``, unless it is known here or gone. Return False if its parent is not known yet."""
        demotion = self._demotion
        for key in filter(None, (note.key, note.parent)):
            demotion.runs.add(key)
        entry = entry_of_note(note, demotion.runs)
        entry.parent = demotion.memory.current(entry.parent)
        if entry.serial in demotion.dropped or demotion.has(entry.serial):
            return True
        if entry.parent and not demotion.has(entry.parent):
            return False
        self._store.learn({note.key: note.size})
        demotion.restore(entry)
        return True
