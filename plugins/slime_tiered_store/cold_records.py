"""Records of any length in a store of blocks; the component ``"cold_store"``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import TypeVar

import anyio

from slime_tiered_store.calls import all_of
from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.errors import NotEnoughSpaceError, NotStored, StoreError
from slime_tiered_store.losses import RecordLosses
from slime_tiered_store.moving import Move, move_to
from slime_tiered_store.note_log import NoteLog, Shortened, StoredNote, new_run
from slime_tiered_store.record_rows import (
    LAYOUT,
    LENGTH,
    blocks_of,
    content_of,
    hashes_of,
    namespace_of,
    rows_of,
    tokens_of,
)
from slime_tiered_store.recovered_blocks import are_whole
from slime_tiered_store.store import TieredStore
from slime_tiered_store.tier import MemoryTier, SharedTier, Tier

__all__ = ["LAYOUT", "ColdRecords"]

_T = TypeVar("_T")


class ColdRecords:
    """Records by key. A record is stored as the rows of one sequence, see ``record_rows``.

    A store evicts blocks, but a record must stay until it is forgotten. So a record counts as kept only when it is in
    the *home*: the remote tier if there is one, else the SSD, else memory. Records use at most 15/16 of the blocks of
    the home: the rest is for forgotten blocks that are still in use. A record for which too few blocks are left waits
    until others are forgotten. A remote tier has more blocks than the SSD (see tiers.settings), so it can become the
    home of all records whose home was the SSD. Notes about records are in the log of the home. Memory has no log: if
    memory is the home, neither records nor notes outlive the router. See also slime_radix_cache.cold_store.
    """

    def __init__(self, *, wait_s: float, stops_on_loss: bool) -> None:
        self.wait_s = wait_s
        self.stops_on_loss = stops_on_loss
        self.waits = self.num_blocks = 0
        self.run = b""
        self.was_deleted: Callable[[bytes], Awaitable[bool]] = _may_be_deleted
        self.session_of: Callable[[bytes], str | None] = lambda key: None
        self.logs: dict[str, NoteLog] = {}
        self.store: TieredStore | None = None
        self.tiers: list[tuple[CacheEngine, Tier | MemoryTier]] = []  # memory first
        self._home, self._capacity = "", 0
        self._blocks: dict[bytes, int] = {}  # the number of blocks of each record, by key
        self.losses = RecordLosses(
            self._blocks, stops=stops_on_loss, place=lambda: self._place,
            session_of=lambda key: self.session_of(key),
        )  # fmt: skip
        self._freed = anyio.Event()
        #: The notes of the tier whose blocks :meth:`move` copies to the home; empty if it copies none. See ColdStore.
        self.uncopied: list[StoredNote] = []
        self._move: Move | None = None
        self._move_is_known = anyio.Event()

    def __len__(self) -> int:
        return len(self._blocks)

    @contextmanager
    def kept_in(
        self,
        store: TieredStore,
        tiers: Sequence[Tier | MemoryTier],
        logs: Mapping[str, NoteLog] | None = None,
    ) -> Iterator[None]:
        """Use ``store`` within the ``with``. ``tiers``: its tiers, memory first. ``logs``: note logs, by tier name."""
        home = store.engine.cache_engines[-1]
        self.tiers = list(zip(store.engine.cache_engines, tiers, strict=True))
        self.store, self._home, self._capacity = store, home.name, home.mempool.num_total_blocks * 15 // 16
        self.logs = dict(logs or {})
        try:
            yield
        finally:
            self.store, self.tiers = None, []

    # Records and notes of earlier runs.

    @property
    def keeps_notes(self) -> bool:
        """True if the home outlives the router."""
        return self._home in self.logs

    async def notes(self) -> list[StoredNote]:
        """Return the notes of earlier runs, oldest first, and begin a new run. Raises StartupError."""
        salvages = not self.stops_on_loss
        read = {name: await log.read(salvages=salvages) for name, log in self.logs.items()}
        found = [note for notes in read.values() for note in notes]
        found.sort(key=lambda note: note.run)  # stable: the notes of a run stay in order
        if self.keeps_notes and not self.is_shared and not found:
            self.losses.without_notes(sum(len(engine.recovered) for engine, _ in self.tiers))
        self.run = new_run(found[-1].run if found else b"")
        for log in self.logs.values():
            log.run = self.run
        if self.keeps_notes:
            latest = {name: notes[-1].run for name, notes in read.items() if notes}
            self._move = move_to(self._home, self.tiers, self.logs[self._home], latest)
            self.uncopied = read[self._move.source] if self._move is not None else []
            self._move_is_known.set()
        return found

    async def mend_notes(
        self, notes: Sequence[StoredNote], damage: Sequence[str], contents: Mapping[str, bytes]
    ) -> list[StoredNote]:
        """Count ``damage`` as losses, write ``contents`` over damaged notes, and return ``notes`` with them."""
        self.losses.in_notes(damage)
        for log in self.logs.values():
            await log.mend(contents)
        return [note._replace(content=contents.get(note.place, note.content)) for note in notes]

    async def move(self) -> None:
        """Wait for :meth:`copy`, then copy the records of ``uncopied`` to the home. Run this in the background."""
        await self._move_is_known.wait()
        if self._move is not None:
            await self._move.run()
            self._move = None

    async def copy(self, opening: Iterable[bytes], closing: bytes) -> None:
        """Write the notes ``opening``, and let :meth:`move` begin. See ColdStore."""
        if self._move is not None:
            await self._move.begin(opening, closing)

    @property
    def is_shared(self) -> bool:
        """True if other routers may write notes and records in the home, too."""
        return self.keeps_notes and self.logs[self._home].is_shared

    async def news(self) -> list[StoredNote]:
        """Return notes that other routers have written since the last call. Raises StoreError."""
        return await self.logs[self._home].news() if self.is_shared else []

    def learn(self, sizes: Mapping[bytes, int]) -> None:
        """Let records of other routers be fetched. ``sizes``: the number of bytes of each record, by key."""
        new = {key: blocks_of(size) for key, size in sizes.items() if key not in self._blocks}
        self._blocks |= new
        self.num_blocks += sum(new.values())

    def unlearn(self, keys: Iterable[bytes]) -> None:
        """Undo :meth:`learn` for the records of ``keys``."""
        for key in keys:
            self._uncount(key)

    async def note(self, content: bytes) -> None:
        """Append a note if the home has a log. Raises StoreError; then the next call must have the same ``content``."""
        if self.keeps_notes:
            await self.logs[self._home].append(content)

    async def replace_notes(self, contents: Iterable[bytes]) -> None:
        """Replace the notes of earlier runs, unless other routers may read them. Raises StartupError."""
        if self.keeps_notes and not self.is_shared:
            await self.logs[self._home].replace(contents)

    async def shorten_notes(self, notes: Sequence[StoredNote], shortened: Shortened) -> None:
        """Rewrite the notes of earlier runs if other routers may read them. See :meth:`NoteLog.shorten`."""
        if self.is_shared:
            await self.logs[self._home].shorten(notes, shortened)

    async def adopt(self, sizes: Mapping[bytes, int]) -> list[bytes]:
        """Keep records of earlier runs, and return the keys of missing ones. ``sizes``: bytes of each record, by key.

        If the home is not shared, blocks that no kept record needs are dropped; else the router may learn of further
        records later. If a tier is a SharedTier, no key is returned: only a read can tell that a record is lost.
        Raises StartupError if records are lost and ``stops_on_loss`` is set; then nothing is dropped.
        """
        hashes = await hashes_of(sizes, self._opened().sequence_meta)
        has_shared = any(isinstance(tier, SharedTier) for _, tier in self.tiers)
        found = [engine.recovered for engine, _ in self.tiers]
        are_there = [True] * len(hashes) if has_shared else are_whole(hashes, found)
        gone = [key for key, is_there in zip(sizes, are_there, strict=True) if not is_there]
        self.losses.at_start(gone, len(sizes))
        self.learn(
            {key: size for (key, size), is_there in zip(sizes.items(), are_there, strict=True) if is_there}
        )
        if not self.is_shared:
            known = b"".join(compress(hashes, are_there))
            for engine, _ in self.tiers:
                engine.recycle_blocks(engine.claim(engine.recovered.without(known)))
        return gone

    @property
    def _place(self) -> str:
        return self.logs[self._home].place if self.keeps_notes else f"tier {self._home}"

    # Records.

    def damaged(self, key: bytes) -> None:
        """Count the record of ``key``, whose content is damaged, as lost."""
        self.losses.damaged(key)

    async def keep(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep ``records``, pairs of key and content. Raises StoreError; then those not kept before are forgotten."""
        new = {key: blocks_of(len(content)) for key, content in records if key not in self._blocks}
        try:
            await self._reserve(new)
            await all_of(self._put, records)
        except BaseException:
            self.forget(list(new))
            raise

    async def _reserve(self, new: dict[bytes, int]) -> None:
        """Wait for room for the ``new`` records, and count them. Raises NotEnoughSpaceError if they never fit."""
        required = sum(new.values())
        if required > self._capacity:
            raise NotEnoughSpaceError(self._home, required, self._capacity)
        self.waits += self.num_blocks + required > self._capacity
        while self.num_blocks + required > self._capacity:
            await self._freed.wait()
        self._blocks |= new
        self.num_blocks += required

    async def _put(self, record: tuple[bytes, bytes]) -> None:
        key, content = record
        tokens = tokens_of(blocks_of(len(content)))
        result = await self._opened().put(namespace_of(key), tokens, rows_of(content))
        if not result.is_stored(self._home):
            raise result.outcomes[self._home] or NotStored(result.outcomes)

    async def fetch(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the record of each key, None if it is lost, deleted or unknown. Raises StoreError if a read fails."""
        found: dict[bytes, bytes | None] = {}

        async def read(key: bytes) -> None:
            found[key] = await self._found(key, partial(self._content, key))

        await all_of(read, list(dict.fromkeys(keys)))
        return [found[key] for key in keys]

    async def _content(self, key: bytes) -> bytes | None:
        return content_of(await self._opened().get(namespace_of(key), tokens_of(self._blocks.get(key, 0))))

    async def holds(self, key: bytes) -> bool:
        """Return False if the record of ``key`` is unknown or seems to be lost. Reads no record. Raises StoreError."""
        blocks = self._blocks.get(key, 0)
        return bool(blocks) and await self._opened().holds(namespace_of(key), tokens_of(blocks))

    async def read(self, key: bytes, into: memoryview) -> bool:
        """Fill ``into`` with the beginning of the record of ``key``, block by block.

        Returns False if the record is lost, deleted, unknown or too short. Raises StoreError if a read fails.
        """
        blocks = blocks_of(len(into))
        if blocks > self._blocks.get(key, 0):
            return False
        return bool(await self._found(key, partial(self._fill, key, blocks, into)))

    async def _fill(self, key: bytes, blocks: int, into: memoryview) -> bool | None:
        """Fill ``into`` from the first ``blocks`` blocks of a record. Returns None if blocks are missing."""
        async with self._opened().borrow(namespace_of(key), tokens_of(blocks)) as rows:
            if rows.num_tokens < blocks:
                return None
            (length,) = LENGTH.unpack_from(rows.pieces[0])
            place = 0
            for number, piece in enumerate(rows.pieces):
                part = piece[LENGTH.size if not number else 0 :][: len(into) - place]
                into[place : place + len(part)] = part
                place += len(part)
            return bool(length >= len(into))

    async def _found(self, key: bytes, read: Callable[[], Awaitable[_T | None]]) -> _T | None:
        return await self.losses.found(key, read, self.was_deleted if self.is_shared else None)

    def _opened(self) -> TieredStore:
        if self.store is None:
            raise StoreError("the store is closed")
        return self.store

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop the records of ``keys``. Unknown keys are ignored."""
        for key in keys:
            blocks = self._uncount(key)
            if blocks and self.store is not None:
                self.store.forget(namespace_of(key), tokens_of(blocks))

    def _uncount(self, key: bytes) -> int:
        """Stop counting the record of ``key``, and return the number of its blocks."""
        blocks = self._blocks.pop(key, 0)
        self.num_blocks -= blocks
        self._freed.set()
        self._freed = anyio.Event()
        return blocks


async def _may_be_deleted(key: bytes) -> bool:
    """Return True: until ``was_deleted`` is set, any missing record of a shared store may have been deleted."""
    return True
