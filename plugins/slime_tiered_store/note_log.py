"""An append-only log of notes, in objects of a remote store or in files. See ``note_objects`` for their names."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, TypeAlias

from router_core.errors import StartupError
from slime_tiered_store.errors import TierFailed
from slime_tiered_store.note_objects import (
    FOLDER,
    RUN_BYTES,
    SECOND_BYTES,
    NoteObject,
    NotesChanged,
    StoredNote,
    moved_name,
    needed_and_missing,
    new_run,
    note_object,
    note_objects,
    whole_name,
)
from slime_tiered_store.note_reading import again_if_changed, contents_of
from slime_tiered_store.tiers.remote.client import RemoteClient, RemoteError

__all__ = ["NoteLog", "Shortened", "StoredNote", "new_run", "once"]

logger = logging.getLogger(__name__)

#: Size in bytes of the number that :meth:`NoteLog.beside` puts into the name of a run.
_NUMBER_BYTES = 3
#: Notes are joined when this many notes are not joined yet, or when they have this many bytes in total.
_JOINED = 64
_JOINED_BYTES = 1 << 20
#: The maximum size of an object into which several objects of an earlier run are joined.
_SHORTENED_BYTES = 8 << 20
_DELETED_AT_ONCE = 1000

#: Takes the contents of the notes of a run. Returns a content in place of each, shorter where possible.
Shortened: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]


class NoteLog:
    """The log at ``client``. Call :meth:`read` once, set ``run``, then call :meth:`append`, one call at a time.

    A note consists of frames (``slime_journal.record_frames``), so that ``slime-router store verify`` finds damage.
    ``call``: makes a call of the client, and repeats it if that may help. ``flag``: the flag that names
    the store, for messages. ``is_shared``: other routers may write notes there now.
    """

    def __init__(
        self, client: RemoteClient, call: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]], *,
        flag: str, is_shared: bool,
    ) -> None:  # fmt: skip
        self.is_shared = is_shared
        self.run = b""
        self._client = client
        self._call = call
        self._flag = flag
        self._next = 1
        self._tail: list[tuple[NoteObject, bytes]] = []
        #: Set by ``read``: the names of all objects, and the needed objects. Both include missing objects.
        self._earlier: list[str] = []
        self._needed: list[NoteObject] = []
        #: Names of objects to delete: their notes are in a joined object, too.
        self._joined: list[str] = []
        #: For each run, the number of the last note that was read. The keys are names of runs, in hex.
        self._read: dict[str, int] = {}
        #: The names, in hex, of the runs that :meth:`beside` began.
        self._beside: set[str] = set()

    def beside(self, run: bytes) -> NoteLog:
        """Return a log in which this router writes the notes of a further run. :meth:`news` leaves out these notes.

        The name of the further run is less than the names of all runs that began after ``run``. It is greater than the
        names of the further runs that earlier routers began for the same ``run``.
        """
        second = run[:SECOND_BYTES]
        number = sum(name.startswith(second.hex()) for name in self._read)
        start = second + number.to_bytes(_NUMBER_BYTES, "big")
        other = NoteLog(self._client, self._call, flag=self._flag, is_shared=self.is_shared)
        other.run = start + os.urandom(RUN_BYTES - len(start))
        self._beside.add(other.run.hex())
        return other

    async def read(self, *, salvages: bool = False) -> list[StoredNote]:
        """Return all notes of earlier runs that are needed, oldest run first. Raises StartupError.

        ``salvages``: missing notes are returned without a content, but with their ``damage``. In a log that is not
        shared, empty and unreadable notes are returned in this way, too. Other errors are raised.
        """

        async def read(takes_missing: bool = False) -> list[StoredNote]:
            names = await self._call(partial(self._client.list, FOLDER))
            objects, missing = needed_and_missing(names)
            if missing and not takes_missing:
                raise NotesChanged(f"{missing[0].name} is missing")
            self._earlier = sorted([*names, *(one.name for one in missing)])
            self._needed = sorted([*objects, *missing])
            damage = {one.name: "it is missing" for one in missing}
            contents = await contents_of(
                objects, self._get, damage if salvages and not self.is_shared else None
            )
            empty = [] if self.is_shared else [name for name in contents if not contents[name]]
            if empty and not salvages:
                raise RemoteError(f"{empty[0]} is empty")
            damage = dict.fromkeys(empty, "it is empty") | damage
            return self._stored(self._needed, contents, damage)

        try:
            try:
                return await again_if_changed(read)
            except NotesChanged:
                if not salvages:
                    raise
                return await read(takes_missing=True)
        except RemoteError as error:
            may_be_left_out = not self.is_shared or isinstance(error, NotesChanged)
            mark = ", or --store-on-loss mark to start without this note" if may_be_left_out else ""
            raise self._refused(f"the log of its records cannot be read: {error}", mark) from None

    async def mend(self, contents: Mapping[str, bytes]) -> None:
        """Write ``contents``, by place, over damaged notes that :meth:`read` has returned. Raises StartupError."""
        mended = {
            one.name: contents[place] for one in self._needed if (place := self._place(one)) in contents
        }
        try:
            for name, content in mended.items():
                await self._call(partial(self._client.put, {name: content}))
        except RemoteError as error:
            raise self._refused(f"a damaged note cannot be replaced: {error}") from None

    def _stored(
        self, objects: Sequence[NoteObject], contents: Mapping[str, bytes], damage: Mapping[str, str] | None = None
    ) -> list[StoredNote]:  # fmt: skip
        self._read |= {one.run: one.last for one in objects}
        return [
            StoredNote(
                bytes.fromhex(one.run),
                self._place(one),
                contents.get(one.name, b""),
                (damage or {}).get(one.name, ""),
            )
            for one in objects
        ]

    async def news(self) -> list[StoredNote]:
        """Return the notes that other routers have written since the last call. Raises TierFailed.

        An object that joins new notes with earlier ones is returned whole.
        """

        async def read() -> list[StoredNote]:
            names = await self._call(partial(self._client.list, FOLDER))
            own, last_read = {self.run.hex(), *self._beside}, dict(self._read)
            new = []
            for one in note_objects(names):
                last = last_read.get(one.run, 0)
                if one.run not in own and one.first <= last + 1 and one.last > last:
                    new.append(one)
                    last_read[one.run] = one.last
            return self._stored(new, await contents_of(new, self._get), {})

        try:
            return await again_if_changed(read)
        except RemoteError as error:
            raise TierFailed("notes", "read", self._client.url, error) from None

    async def _get(self, name: str) -> bytes | None:
        content: bytes | None = await self._call(partial(self._client.get, name))
        return content

    async def append(self, content: bytes) -> None:
        """Write a note durably. Raises TierFailed; then the next call must have the same ``content``."""
        one = note_object(self.run.hex(), self._next, self._next)
        try:
            await self._call(partial(self._client.put, {one.name: content}))
        except RemoteError as error:
            raise TierFailed("notes", "write", self._client.url, error) from None
        self._next += 1
        self._tail.append((one, content))
        if len(self._tail) >= _JOINED or sum(len(each) for _, each in self._tail) >= _JOINED_BYTES:
            await self._join()

    async def _join(self) -> None:
        """Write the latest notes into one object, and delete the objects of the single notes. A failure is logged.

        In a shared log, the objects of single notes are deleted only at the next join: another router may be reading
        them right now. After a failure, some objects of single notes may stay.
        """
        tail, self._tail = self._tail, []
        if len(tail) == 1:
            return
        joined = note_object(self.run.hex(), tail[0][0].first, tail[-1][0].last)
        try:
            await self._call(partial(self._client.put, {joined.name: b"".join(each for _, each in tail)}))
            names = [one.name for one, _ in tail]
            gone, self._joined = (self._joined, names) if self.is_shared else (names, [])
            if gone:
                await self._call(partial(self._client.delete, gone))
        except RemoteError as error:
            logger.warning("%s: notes are not joined: %s", self._client.url, error)

    async def replace(self, contents: Iterable[bytes]) -> None:
        """Write notes with ``contents`` in place of all notes of earlier runs. Raises StartupError."""
        try:
            for content in contents:
                await self.append(content)
            await self._call(partial(self._client.put, {whole_name(self.run.hex()): b""}))
            await self._delete(self._earlier)
        except (RemoteError, TierFailed) as error:
            raise self._refused(f"the log of its records cannot be written: {error}") from None
        self._earlier, self._needed = [], []

    def has_copies_of(self, run: bytes) -> bool:
        """Return True if an earlier router has called :meth:`note_copies_of` for ``run``."""
        return moved_name(run.hex()) in self._earlier

    async def note_copies_of(self, run: bytes) -> None:
        """Record that another log was copied up to ``run``. Raises TierFailed.

        Its notes are in this log then, and the intact records that it names are in the tier of this log.
        """
        try:
            await self._call(partial(self._client.put, {moved_name(run.hex()): b""}))
        except RemoteError as error:
            raise TierFailed("notes", "write", self._client.url, error) from None

    async def shorten(self, notes: Sequence[StoredNote], shortened: Shortened) -> None:
        """Rewrite the notes of each earlier run that has several objects. A failure is logged.

        ``notes``: what :meth:`read` returned. ``shortened``: called with the contents of the notes of a run. Other
        routers may rewrite these notes now, and the router that wrote them may still write and join notes. An object is
        deleted only when its notes are also in objects that begin with an earlier note, or that begin with the same
        note and are longer. So no router deletes what another one needs.
        """
        contents = {note.place: note.content for note in notes}
        listed: dict[str, list[str]] = {}
        for one in note_objects(self._earlier):
            listed.setdefault(one.run, []).append(one.name)
        try:
            for run, each in groupby(self._needed, lambda one: one.run):
                objects = list(each)
                former = [contents[self._place(one)] for one in objects]
                if len(listed[run]) > 1:
                    kept = await self._rewrite(list(zip(objects, former, shortened(former), strict=True)))
                    await self._delete([name for name in listed[run] if name not in kept])
        except RemoteError as error:
            logger.warning("%s: notes of earlier runs are not shortened: %s", self._client.url, error)

    async def _rewrite(self, notes: Sequence[tuple[NoteObject, bytes, bytes]]) -> set[str]:
        """Join consecutive notes of a run into objects of limited size. Return the names of these objects.

        ``notes``: for each object of the run, the object, its content, and its shortened content.
        """
        kept = set()
        while notes:
            ends = accumulate(len(content) for *_, content in notes)
            some = notes[: max(1, sum(end <= _SHORTENED_BYTES for end in ends))]
            joined = note_object(some[0][0].run, some[0][0].first, some[-1][0].last)
            content = b"".join(content for *_, content in some)
            if len(some) > 1 or len(content) < len(some[0][1]):
                await self._call(partial(self._client.put, {joined.name: content}))
            kept.add(joined.name)
            notes = notes[len(some) :]
        return kept

    async def _delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DELETED_AT_ONCE):
            await self._call(partial(self._client.delete, names[start : start + _DELETED_AT_ONCE]))

    def _place(self, one: NoteObject) -> str:
        return f"{self._client.url}/{one.name}"

    @property
    def place(self) -> str:
        """The flag and the address of the store, for messages."""
        return f"{self._flag} {self._client.url}"

    def _refused(self, why: str, mark: str = "") -> StartupError:
        return StartupError(
            f"{self.place}: {why}; give another directory, or prefix, to start without these records{mark}"
        )


async def once(call: Callable[[], Awaitable[Any]]) -> Any:
    """Make ``call`` once. For a NoteLog that need not repeat failed calls."""
    return await call()
