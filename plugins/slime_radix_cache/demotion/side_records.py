"""Records of another plugin in the store of demoted trajectories: the turns of chats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Sequence, Set
from typing import NamedTuple

import anyio

from slime_radix_cache.cold_store import ColdStore
from slime_radix_cache.demotion.asked_again import PlacesAskedAgain
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.notes import AskedAgain, Dropped, SideRecord
from slime_radix_cache.demotion.past import Past
from slime_radix_cache.demotion.saving import SegmentSaver
from slime_radix_cache.index.losses import Losses

__all__ = ["SideRecords"]

_AT_ONCE = 64  # records that are written together


class _Unsaved(NamedTuple):
    """A record that is not in the store yet. ``parent``: the key of the record that it continues, or empty."""

    parent: bytes
    content: Callable[[], bytes]


class SideRecords:
    """The component ``"side_records"``; see SideRecords in the contracts. ``losses`` gets a mark for a lost record."""

    def __init__(self, demotion: Demotion, losses: Losses) -> None:
        self._demotion = demotion
        self._losses = losses
        self._store: ColdStore | None = None
        self._saver: SegmentSaver
        self._look: Callable[[], Awaitable[None]]
        self._failed: Callable[[str, Exception], Exception]
        #: All records. The size of a record that is not saved yet is 0.
        self._notes: dict[bytes, SideRecord] = {}
        #: Keys by name and by place. A single key, the most frequent case, has no dict around it, to save memory.
        self._keys: dict[bytes, bytes | dict[bytes, None]] = {}
        self._of: dict[str | None, dict[bytes, None]] = {}
        self._unsaved: dict[str | None, dict[bytes, _Unsaved]] = {}
        self._asked_again = PlacesAskedAgain()
        #: Keys of records at places where another router has begun a later request.
        self._outdated: set[bytes] = set()
        self._waiting: list[bytes] = []  # keys of records to be saved soon
        #: See the contract.
        self.is_coming: Callable[[bytes], bool] = lambda key: False
        self._news = anyio.Event()
        self._lock = anyio.Lock()

    def begin(
        self, store: ColdStore, saver: SegmentSaver, look: Callable[[], Awaitable[None]],
        failed: Callable[[str, Exception], Exception],
    ) -> None:  # fmt: skip
        """Begin to keep records in ``store``.

        ``look()`` reads the notes of other routers; ``failed(kind, error)`` returns the error to raise for a request.
        """
        self._store, self._saver, self._look, self._failed = store, saver, look, failed

    def restore(self, past: Past, gone: Container[bytes]) -> None:
        """Add the records of ``past``. ``gone``: keys that the store does not have any more."""
        self._asked_again.add(past.asked_again)
        for note in past.side_records.values():
            self._add(note)
            if note.key in gone:
                self.lose_record(note.key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._notes

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def unsaved_sessions(self) -> Set[str | None]:
        """The sessions with records that are not in the store yet."""
        return self._unsaved.keys()

    @property
    def is_on(self) -> bool:
        """See the contract."""
        return self._store is not None and self._store.keeps_notes

    @property
    def _is_shared(self) -> bool:
        return self._store is not None and self._store.is_shared

    # Writing.

    def add(
        self, session: str | None, name: bytes, place: bytes, parent: bytes, content: Callable[[], bytes]
    ) -> bytes:
        """See the contract."""
        key = self._demotion.runs.key(self._demotion.runs.next_serial())
        self._add(SideRecord(key, 0, session, name, place))
        self._unsaved.setdefault(session, {})[key] = _Unsaved(parent, content)
        return key

    def save_soon(self, key: bytes) -> None:
        """See the contract."""
        if self._unsaved_record(key) is not None:
            self._waiting.append(key)
            self._news.set()

    async def run(self) -> None:
        """Save the records that are to be saved soon, until cancelled."""
        while True:
            self._news = anyio.Event()
            while self._waiting and await self._save(self._waiting[:_AT_ONCE]):
                del self._waiting[:_AT_ONCE]
            await self._news.wait()

    def forget(self, session: str) -> None:
        """Drop the records of ``session``."""
        for key in list(self._of.get(session, ())):
            self._drop(key)

    async def save(self, sessions: Iterable[str | None]) -> None:
        """Put the records of ``sessions``, and the records that these continue, into the store and its log.

        Records stay unsaved if the store's ``wait_s`` is too short.
        """
        wanted = [key for session in sessions for key in self._unsaved.get(session, ())]
        for start in range(0, len(wanted), _AT_ONCE):
            if not await self._save(wanted[start : start + _AT_ONCE]):
                return

    async def save_all(self) -> None:
        """Put all records into the store and its log. A session with a record that stays unsaved counts as lost."""
        await self.save(list(self._unsaved))
        for session in self._unsaved:
            self.lose(session)

    def _with_parents(self, keys: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        """Return the unsaved records of ``keys`` and their unsaved ancestors: pairs of key and content."""
        found: dict[bytes, bytes] = {}
        for key in keys:
            while key not in found and (unsaved := self._unsaved_record(key)) is not None:
                found[key] = unsaved.content()
                key = unsaved.parent
        return list(found.items())

    def _unsaved_record(self, key: bytes) -> _Unsaved | None:
        note = self._notes.get(key)
        return self._unsaved.get(note.session, {}).get(key) if note is not None else None

    async def _save(self, keys: Sequence[bytes]) -> bool:
        async with self._lock:  # if two writes had the same record, the failure of one would remove it
            return await self._saver.save_records(self._with_parents(keys), self._saved)

    def _saved(self, key: bytes, size: int) -> SideRecord | Dropped:
        """Note that the store has the record of ``key``; return the note for the log."""
        note = self._notes.get(key)
        if note is None:
            return Dropped(key)  # its session was forgotten meanwhile
        self._pop_unsaved(note)
        note = self._notes[key] = note._replace(size=size)
        return note

    def _pop_unsaved(self, note: SideRecord) -> bool:
        unsaved = self._unsaved.get(note.session, {})
        was_unsaved = unsaved.pop(note.key, None) is not None
        if was_unsaved and not unsaved:
            del self._unsaved[note.session]
        return was_unsaved

    def _add(self, note: SideRecord) -> None:
        if note.key not in self._notes:  # another router's note may come again
            for name in (note.name, note.place):
                keys = self._keys.setdefault(name, note.key)
                if isinstance(keys, dict):
                    keys[note.key] = None
                elif keys != note.key:
                    self._keys[name] = dict.fromkeys((keys, note.key))
            self._of.setdefault(note.session, {})[note.key] = None
        self._notes[note.key] = note

    def session_of(self, key: bytes) -> str | None:
        """Return the session of the record of ``key``; None if the record has no session, or is not known."""
        return self._notes[key].session if key in self._notes else None

    def remove(self, key: bytes) -> bool:
        """Remove the record of ``key``, if there is one. Returns True if it was saved."""
        note = self._notes.pop(key, None)
        self._outdated.discard(key)
        if note is None:
            return False
        for name in (note.name, note.place):
            keys = self._keys[name]
            if isinstance(keys, dict):
                del keys[key]
            if not isinstance(keys, dict) or not keys:
                del self._keys[name]
        if note.place not in self._keys and not self._is_shared:  # else others' records may still come
            self._asked_again.forget(note.place)
        own = self._of[note.session]
        del own[key]
        if not own:
            del self._of[note.session]
        return not self._pop_unsaved(note)

    def _under(self, name: bytes) -> Collection[bytes]:
        keys = self._keys.get(name, {})
        return keys if isinstance(keys, dict) else (keys,)

    def _drop(self, key: bytes) -> None:
        """Remove the record of ``key``, also from the store."""
        runs = self._demotion.runs
        if self.remove(key):
            self._saver.writer.add(Dropped(key))
            runs.add(key)
            if not runs.is_own(runs.serial(key)):
                self._demotion.dropped.add(runs.serial(key))

    # Reading.

    def find(self, names: Iterable[bytes]) -> list[bytes]:
        """See the contract."""
        keys = {key for name in names for key in self._under(name)}
        return sorted(key for key in keys if self._is_proved(self._notes[key]))

    def has_answers(self, place: bytes) -> bool:
        """See the contract."""
        return bool(self._under(place))

    def _is_proved(self, note: SideRecord) -> bool:
        """Return False if another record at the same place may be lost: the client may mean the lost record."""
        if not self.has_lost(note.session):
            return True
        has_unknown_asks = note.session is None and self._is_shared
        return not has_unknown_asks and note.place not in self._asked_again

    def has_later_elsewhere(self, key: bytes) -> bool:
        """See the contract."""
        return key in self._outdated and self.has_lost(self._notes[key].session)

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """See the contract."""
        unsaved = {key: one.content() for key in keys if (one := self._unsaved_record(key)) is not None}
        saved = [key for key in keys if key not in unsaved]
        assert self._store is not None  # narrowing: without a store there are no keys
        try:
            found = dict(zip(saved, await self._store.fetch(saved) if saved else (), strict=True))
        except Exception as error:
            raise self._failed("fetch", error) from error
        for key, content in found.items():
            if content is None and key in self._notes:
                self.lose_record(key)
        return [unsaved[key] if key in unsaved else found[key] for key in keys]

    def lose_record(self, key: bytes) -> None:
        """Note that the record of ``key`` is not in the store any more."""
        self.lose(self._notes[key].session)
        self._drop(key)

    def lose(self, session: str | None) -> None:
        """Mark ``session`` as having lost a record. If it is None, mark the requests without a session."""
        if session is None:
            self._losses.texts.add(b"")
        else:
            self._losses.sessions.add(session)

    def has_lost(self, session: str | None) -> bool:
        """See the contract."""
        return b"" in self._losses.texts if session is None else session in self._losses

    def is_own(self, key: bytes) -> bool:
        """See the contract."""
        return self._demotion.runs.is_own(self._demotion.runs.serial(key))

    async def ask_again(self, place: bytes) -> None:
        """See the contract."""

        def is_in_log() -> bool:
            return any(self._notes[key].size for key in self._under(place))

        await self._asked_again.note(place, self._saver.writer, is_in_log)

    # Other routers.

    async def look(self) -> None:
        """See the contract."""
        await self._look()

    def learn(self, note: SideRecord | AskedAgain) -> None:
        """Take a ``note`` of another router."""
        if isinstance(note, AskedAgain):
            self._asked_again.add([note.place])
            self._outdated.update(self._under(note.place))
            return
        runs = self._demotion.runs
        runs.add(note.key)
        if runs.serial(note.key) not in self._demotion.dropped and self._store is not None:
            self._store.learn({note.key: note.size})
            self._add(note)
