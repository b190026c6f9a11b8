"""An append-only log of notes, as objects of a remote store or files of a directory.

A note is an object ``notes/RUN.FIRST-LAST``. RUN is the name of the run of a router that wrote it, in hex. FIRST and
LAST number the notes of a run from 1; small notes are joined to one object later. An object ``notes/RUN.whole`` says
that the notes of this run, and of later ones, are all that is needed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from anyio import create_task_group

from router_core.errors import StartupError
from slime_tiered_store.errors import TierFailed
from slime_tiered_store.tiers.remote.client import RemoteClient, RemoteError

__all__ = ["FOLDER", "NoteLog", "StoredNote", "new_run", "once"]

logger = logging.getLogger(__name__)

#: The name of a run: the second of its start, and random bytes. Later runs have greater names.
_RUN_BYTES, _SECOND_BYTES = 11, 4
FOLDER = "notes"
_NAME = re.compile(r"notes/([0-9a-f]{22})\.(\d+)-(\d+)")
_WHOLE = re.compile(r"notes/([0-9a-f]{22})\.whole")
#: Notes are joined when there are so many, or so many bytes of them.
_JOINED = 64
_JOINED_BYTES = 1 << 20
_AT_ONCE = 16
_DELETED_AT_ONCE = 1000


class StoredNote(NamedTuple):
    """A note, or several joined ones. ``place``: its name, for messages."""

    run: bytes
    place: str
    content: bytes


class _Object(NamedTuple):
    run: str
    first: int
    last: int
    name: str


def new_run(after: bytes) -> bytes:
    """Return a name for a run that starts now, greater than that of the run ``after``."""
    second = max(int(time.time()), int.from_bytes(after[:_SECOND_BYTES], "big") + 1 if after else 0)
    return second.to_bytes(_SECOND_BYTES, "big") + os.urandom(_RUN_BYTES - _SECOND_BYTES)


class NoteLog:
    """The log at ``client``. Call :meth:`read` once, set ``run``, then :meth:`append`, one call at a time.

    ``call``: makes a call of the client, again if that may help. ``flag``: the flag that chose the place, for
    messages. ``is_shared``: other routers may write notes there now.
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
        self._tail: list[tuple[_Object, bytes]] = []
        self._earlier: list[str] = []
        #: Notes that are joined, but not deleted.
        self._joined: list[str] = []
        #: By run, in hex: the number of the last note that was read.
        self._read: dict[str, int] = {}

    async def read(self) -> list[StoredNote]:
        """Return all notes of earlier runs that are needed, oldest run first. Raises StartupError."""
        try:
            names = await self._call(partial(self._client.list, FOLDER))
            self._earlier = sorted(names)
            objects = self._needed(names)
            contents = await self._contents(objects)
        except RemoteError as error:
            raise self._refused(f"the log of its records cannot be read: {error}") from None
        return self._stored(objects, contents)

    def _stored(self, objects: Sequence[_Object], contents: Mapping[str, bytes]) -> list[StoredNote]:
        self._read |= {one.run: one.last for one in objects}
        return [
            StoredNote(bytes.fromhex(one.run), f"{self._client.url}/{one.name}", contents[one.name])
            for one in objects
        ]

    async def news(self) -> list[StoredNote]:
        """Return the notes that other routers have written since the last call, and perhaps earlier ones again.

        Raises TierFailed.
        """
        try:
            names = await self._call(partial(self._client.list, FOLDER))
            found = [found for found in map(_NAME.fullmatch, names) if found]
            objects = [_Object(each[1], int(each[2]), int(each[3]), each[0]) for each in found]
            own, read = self.run.hex(), dict(self._read)
            new = []
            for one in sorted(objects, key=lambda one: (one.run, one.first, -one.last)):
                last = read.get(one.run, 0)
                if one.run != own and one.first <= last + 1 and one.last > last:
                    new.append(one)
                    read[one.run] = one.last
            return self._stored(new, await self._contents(new))
        except RemoteError as error:  # also if notes are joined right now
            raise TierFailed("notes", "read", self._client.url, error) from None

    def _needed(self, names: Sequence[str]) -> list[_Object]:
        """Return the objects to read, in order. Raises StartupError if one is missing."""
        whole = max((found[1] for found in map(_WHOLE.fullmatch, names) if found), default="")
        each = [found for found in map(_NAME.fullmatch, names) if found and found[1] >= whole]
        objects: list[_Object] = []
        for one in sorted(
            (_Object(found[1], int(found[2]), int(found[3]), found[0]) for found in each),
            key=lambda one: (one.run, one.first, -one.last),
        ):
            before = objects[-1] if objects and objects[-1].run == one.run else None
            last = before.last if before is not None else 0
            if one.last <= last:
                continue  # it was joined to the object before, and not deleted yet
            if one.first != last + 1:
                missing = f"{FOLDER}/{one.run}.{last + 1}-{one.first - 1}"
                raise self._refused(f"{self._client.url}/{missing} is missing")
            objects.append(one)
        return objects

    async def _contents(self, objects: Sequence[_Object]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        errors: list[RemoteError] = []
        rest = iter(objects)

        async def get() -> None:
            for one in rest:
                try:
                    content = await self._call(partial(self._client.get, one.name))
                    if content is None:
                        raise RemoteError(f"{one.name} was deleted meanwhile")
                except RemoteError as error:
                    errors.append(error)
                if errors:
                    return
                found[one.name] = bytes(content)

        async with create_task_group() as tasks:
            for _ in range(_AT_ONCE):
                tasks.start_soon(get)
        if errors:
            raise errors[0]
        return found

    async def append(self, content: bytes) -> None:
        """Write a note; it is durable when the call returns. Raises TierFailed: then repeat it with this content."""
        one = self._object(self._next, self._next)
        try:
            await self._call(partial(self._client.put, one.name, content))
        except RemoteError as error:
            raise TierFailed("notes", "write", self._client.url, error) from None
        self._next += 1
        self._tail.append((one, content))
        if len(self._tail) >= _JOINED or sum(len(each) for _, each in self._tail) >= _JOINED_BYTES:
            await self._join()

    async def _join(self) -> None:
        """Join the latest notes to one object. After a failure they stay as they are.

        Another router may be listing or reading them right now, so in a shared log they are deleted at the next join.
        """
        tail, self._tail = self._tail, []
        if len(tail) == 1:
            return
        joined = self._object(tail[0][0].first, tail[-1][0].last)
        try:
            await self._call(partial(self._client.put, joined.name, b"".join(each for _, each in tail)))
            names = [one.name for one, _ in tail]
            gone, self._joined = (self._joined, names) if self.is_shared else (names, [])
            if gone:
                await self._call(partial(self._client.delete, gone))
        except RemoteError as error:
            logger.warning("%s: notes are not joined: %s", self._client.url, error)

    async def replace(self, contents: Iterable[bytes]) -> None:
        """Write notes that say all that those of earlier runs say, and delete these. Raises StartupError."""
        try:
            for content in contents:
                await self.append(content)
            await self._call(partial(self._client.put, f"{FOLDER}/{self.run.hex()}.whole", b""))
            for start in range(0, len(self._earlier), _DELETED_AT_ONCE):
                names = self._earlier[start : start + _DELETED_AT_ONCE]
                await self._call(partial(self._client.delete, names))
        except (RemoteError, TierFailed) as error:
            raise self._refused(f"the log of its records cannot be written: {error}") from None
        self._earlier = []

    def _object(self, first: int, last: int) -> _Object:
        run = self.run.hex()
        return _Object(run, first, last, f"{FOLDER}/{run}.{first}-{last}")

    def _refused(self, why: str) -> StartupError:
        return StartupError(
            f"{self._flag} {self._client.url}: {why}; give another directory, or prefix, to start without these records"
        )


async def once(call: Callable[[], Awaitable[Any]]) -> Any:
    """Make ``call`` once."""
    return await call()
