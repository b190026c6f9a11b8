"""The notes of earlier runs about demoted segments and sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import groupby, islice, starmap
from typing import Any

from router_core.errors import StartupError
from slime_radix_cache.cold_store import StoredNote
from slime_radix_cache.demotion.copying import Copies, beginnings_of
from slime_radix_cache.demotion.key_ranges import KeyRanges
from slime_radix_cache.demotion.note_reader import NoteReader
from slime_radix_cache.demotion.notes import (
    FORMAT,
    AskedAgain,
    Begun,
    Copying,
    DamagedNote,
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
    packed,
)
from slime_radix_cache.index.losses import Losses, digest_of

__all__ = ["Past", "mark_lost"]

#: How many notes are written together.
_TOGETHER = 4096


class Past:
    """The facts in ``notes`` (earliest first).

    Raises StartupError if a note is of another ``tokenizer``, or is damaged and ``reader`` does not leave it out.

    ``segments``: the latest note about each segment, by key, in the order of the first notes. ``rows``: notes about
    rows; of several notes about the same rows, the note of the latest run is first. ``dropped``: keys that are never
    used again; if the store is shared, a note about such a key may still come. ``dropped_rows``: keys of dropped
    records of rows. If the store is not shared, a note about rows does not count if one of its records was dropped.

    A session is open between a Begun and a Settled note. A session that was open at the end of a run is lost. But if
    the store is shared, that run may still go on, so ``open`` has the session instead, with the runs where it is open.
    A run without an Ended note may also have lost answers to requests without a session.

    ``copies``: unfinished copies of other routers to the store. ``hidden``: segments that these copies may bring.
    ``waiting``: segments that continue hidden ones.

    ``here``: the notes about records that this router is about to copy to the store. The notes of its earlier,
    unfinished copies, whose runs are ``replaced``, do not count. ``gone``: keys of records that an earlier copy was to
    bring, and that this router does not have any more.

    ``reader`` reads the notes. If it leaves out damaged ones, all sessions of the other notes count as lost, and so do
    answers to requests without a session: a damaged note may have been about any of them. ``marks``: notes that say so.
    """

    def __init__(
        self, notes: Sequence[StoredNote], tokenizer: str, *, is_shared: bool = False,
        here: Past | None = None, reader: NoteReader | None = None,
    ) -> None:  # fmt: skip
        self.segments: dict[bytes, Demoted] = {}
        self.grown: dict[bytes, bytes] = {}
        self.lost: dict[Lost, None] = {}
        self.unanswered: set[str] = set()
        self.side_records: dict[bytes, SideRecord] = {}
        self.asked_again: set[bytes] = set()
        self.open: dict[str, set[bytes]] = {}
        #: By response, name and run. If the store is not shared, the run is left out (``b""``): then a note replaces
        #: those of earlier runs.
        self._rows: dict[tuple[bytes, str, bytes], Rows] = {}
        self._is_shared = is_shared
        self.begun = RunBegun(FORMAT, tokenizer)
        self._reader = reader or NoteReader()
        self._names: set[str] = set()
        self._is_proved = False
        self.marks: list[Any] = []
        self.dropped: set[bytes] = set()
        self.dropped_rows = KeyRanges()
        self.copies = Copies()
        self._replaced: set[bytes] = set()
        #: The keys of the records that each unfinished copy is about.
        self._copied: dict[bytes, set[bytes]] = {}
        for run, each in groupby(notes, lambda note: note.run):
            self._read_run(run, each)
        if self._reader.damage:
            self._mark_all()
        self.replaced = self.copies.of(here.beginnings) if here is not None else []
        copied = set[bytes]().union(*(self._copied[run] for run in self.replaced))
        known = (here.segments.keys() | here.side_records.keys()) if here is not None else set[bytes]()
        self.gone = copied - known - self.dropped
        self.dropped |= self.gone
        #: Dropped keys with a Demoted or SideRecord note. :meth:`as_notes` repeats that they are dropped: the log of
        #: another tier, which the new notes do not replace, may have such a note, too.
        self._still_noted = [
            key for key in self.dropped for kept in (self.segments, self.side_records) if kept.pop(key, None)
        ]
        self._leave_out({*self.replaced, *self._replaced})
        if self.copies:
            self.lost[Lost("text", *digest_of(b""))] = None
        self.hidden, self.waiting = self._set_aside()
        self.rows = [note for note in reversed(self._rows.values()) if self._are_needed(note)]
        if not is_shared:  # else another router's record may still come
            self.asked_again &= {note.place for note in self.side_records.values()}

    def _read_run(self, run: bytes, notes: Iterable[StoredNote]) -> None:
        open_sessions: set[str] = set()
        is_begun = has_ended = False
        for stored in notes:
            try:
                some = self._reader.read(stored)
                # The first note of the run may be damaged. Then another run must show that the tokenizer is the same.
                is_begun = is_begun or self._reader.is_damaged(stored)
                for note in some:
                    if isinstance(note, RunBegun):
                        self._is_proved |= (is_begun := note == self.begun)
                    if not is_begun:
                        raise WrongNote(f"wanted notes of {self.begun}, got {note}")
                    if isinstance(note, Rows):
                        self._rows[note.key, note.name, run if self._is_shared else b""] = note
                        continue
                    if isinstance(note, DroppedRows):
                        self.dropped_rows.update(note.keys)
                        continue
                    if isinstance(note, Copying):
                        self.copies.begin(run, note)
                        self._copied.setdefault(run, set())
                        self._replaced.update(note.replaces)
                    if run in self._copied and isinstance(note, Demoted | SideRecord):
                        self._copied[run].add(note.key)
                    has_ended = isinstance(note, Ended)
                    self._take(note, open_sessions)
            except WrongNote as wrong:
                raise _refused(f"{stored.place}: {wrong}", isinstance(wrong, DamagedNote)) from None
        if has_ended:
            self.copies.end(run)
            open_sessions.clear()
        if self._is_shared:
            for session in open_sessions:
                self.open.setdefault(session, set()).add(run)
        else:
            self.lost |= {Lost("session", *digest_of(session)): None for session in open_sessions}
        if not has_ended and run not in self.copies:
            self.lost[Lost("text", *digest_of(b""))] = None

    def _mark_all(self) -> None:
        # One RunBegun note is enough, since a router with another tokenizer does not start with this log.
        if not self._is_proved:
            raise _refused(f"{self._reader.damage[0]}, and no other note names the tokenizer", False)
        self._names.update(self.unanswered, self.sessions)
        self.lost |= {Lost("session", *digest_of(session)): None for session in self._names}
        self.lost[Lost("text", *digest_of(b""))] = None
        self.asked_again.update(note.place for note in self.side_records.values())
        self.marks = [*map(AskedAgain, self.asked_again), *self.lost]

    def _take(self, note: Any, open_sessions: set[str]) -> None:
        match note:
            case Demoted():
                self.segments[note.key] = note
            case Dropped():
                self.dropped.add(note.key)
            case Grew():
                self.grown[note.part] = note.whole
            case Begun():
                open_sessions.add(note.session)
                self._names.add(note.session)
            case Settled():
                open_sessions.discard(note.session)
                self._names.add(note.session)
            case Unanswered():
                self.unanswered.add(note.session)
            case Lost():
                self.lost[note] = None
            case SideRecord():
                self.side_records[note.key] = note
            case AskedAgain():
                self.asked_again.add(note.place)

    def _leave_out(self, replaced: Set[bytes]) -> None:
        """Leave out the notes of unfinished copies that other copies have replaced, or will replace."""
        for run in replaced:
            self.copies.end(run)
        for session, runs in list(self.open.items()):
            runs -= replaced
            if not runs:
                del self.open[session]

    def _set_aside(self) -> tuple[dict[bytes, Demoted], dict[bytes, Demoted]]:
        """Take the hidden segments, and the segments that continue them, out of ``segments``; return both."""
        hidden = {key: note for key, note in self.segments.items() if self.copies.may_bring(key)}
        children = defaultdict[bytes, list[Demoted]](list)
        for note in self.segments.values():
            children[note.parent].append(note)
        waiting: dict[bytes, Demoted] = {}
        rest = list(hidden.values())
        while rest:
            note = rest.pop()
            if self.segments.pop(note.key, None) is not None:
                rest += children[note.key]
                if note.key not in hidden:
                    waiting[note.key] = note
        return hidden, waiting

    @property
    def beginnings(self) -> frozenset[bytes]:
        """The beginnings of the keys of all records."""
        return beginnings_of(self.sizes)

    @property
    def sessions(self) -> list[str]:
        """The sessions of the segments and of the side records."""
        known = (self.segments, self.side_records)
        found = dict.fromkeys(note.session for notes in known for note in notes.values())
        return [session for session in found if session is not None]

    def _are_needed(self, note: Rows) -> bool:
        """Return True if ``note`` is about all responses, or if its response is known or may be noted later.

        If the store is not shared, a note about one response is needed only if none of its records was dropped.
        """
        if self._is_shared:
            return not note.key or note.key in self.segments or note.key not in self.dropped
        has_rows = not any(key in self.dropped_rows for key, _ in note.records)
        return not note.key or (note.key in self.segments and has_rows)

    @property
    def sizes(self) -> dict[bytes, int]:
        """Sizes of the needed records, in bytes, by key. If the store is shared, the records of rows are left out."""
        rows = [] if self._is_shared else self.rows
        sizes = {key: size for note in rows for key, size in note.records}
        known = (self.segments, self.side_records)
        return sizes | {key: note.size for notes in known for key, note in notes.items()}

    def as_notes(self) -> Iterator[bytes]:
        """Yield notes with the same facts, as bytes. They may be read together with the notes of other logs."""
        dropped = map(Dropped, self._still_noted)
        known = [
            *self.segments.values(),
            *self.side_records.values(),
            *map(AskedAgain, self.asked_again),
            *dropped,
            *starmap(Grew, self.grown.items()),
            *self.rows,
            *self.lost,
            *self._unanswered(),
        ]
        rest = iter([self.begun, *known])
        while some := list(islice(rest, _TOGETHER)):
            yield packed(some)

    def _unanswered(self) -> Iterator[Unanswered]:
        return map(Unanswered, self.unanswered)


def _refused(why: str, is_damage: bool) -> StartupError:
    mark = ", or --store-on-loss mark to start with the notes that can be read" if is_damage else ""
    return StartupError(
        f"the log of demoted trajectories cannot be read: {why}; "
        f"give the store another directory, or prefix, to start without them{mark}"
    )


def mark_lost(note: Lost, losses: Losses) -> None:
    """Mark in ``losses`` what ``note`` says is lost."""
    marks = {"session": losses.sessions, "text": losses.texts}
    marks[note.kind].add_digest((note.first, note.second))
