"""Moves rows, such as routed experts, to a store of records when memory has no room for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import anyio
import anyio.lowlevel

from slime_r3 import reasons
from slime_r3.pieces import Piece, StoredAs
from slime_r3.reading import RowReader
from slime_r3.record_store import RecordStore
from slime_r3.turn_rows import TurnRows

__all__ = ["ColdRows"]

logger = logging.getLogger(__name__)

#: About this many bytes are written at once.
_BATCH_BYTES = 4 << 20
#: The first and the longest wait before a failed write is repeated, in seconds. The wait doubles each time.
_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0


class ColdRows:
    """Moves rows of ``turns`` to a store, if there is one, and deletes them there. A record has rows of one piece.

    From a store that routers share, a router deletes only records that it has written itself since its start.
    ``drop_noted(keys)`` notes in the store's log that records are not needed any more, and then deletes them. Without a
    log ``drop_noted`` is None, and records are deleted without a note.
    """

    def __init__(self, turns: TurnRows) -> None:
        self.reader = RowReader(turns)
        self._turns = turns
        self._store: RecordStore | None = None
        self._prefix = os.urandom(8)
        self._next = 0
        self._news = anyio.Event()
        self._moving = anyio.Lock()
        self._has_failed = False
        self.drop_noted: Callable[[Sequence[bytes]], None] | None = None

    async def run(self, store: RecordStore) -> None:
        """Move the oldest rows to ``store`` whenever memory has too many. Drop rows that the store does not take."""
        self._store = self.reader.store = store
        self._turns.forget_records = self._forget
        self._turns.memory.on_full.append(lambda: self._news.set())
        while True:
            while turns := self._turns.overdue(_BATCH_BYTES):
                if not await self._move(store, turns):
                    self._drop(store, turns)
                self._turns.memory.has_progressed()
                await anyio.lowlevel.checkpoint()
            self._news = anyio.Event()
            await self._news.wait()

    async def save(self) -> None:
        """Move all rows to the store, and drop those that it does not take. Call this after the end of :meth:`run`."""
        if self._store is not None:
            while turns := self._turns.overdue(_BATCH_BYTES, all_must_go=True):
                if not await self._move(self._store, turns):
                    self._drop(self._store, turns)

    async def save_of(self, turns: Sequence[Hashable]) -> None:
        """Move the rows of ``turns`` to the store.

        If the store does not take a batch of these rows within ``wait_s``, all of them stay in memory.
        """
        turns = [turn for turn in turns if self._turns.in_memory(turn)]
        if self._store is not None and turns:
            await self._move(self._store, turns)

    async def room(self) -> None:
        """Wait while rows exceed the limit of memory by over a quarter, for ``wait_s`` of the store at most."""
        if self._store is not None:
            await self._turns.memory.room(self._store.wait_s)

    async def _move(self, store: RecordStore, turns: Sequence[Hashable]) -> bool:
        """Move the rows of ``turns`` to ``store``. Returns False if a batch takes longer than ``store.wait_s``."""
        async with self._moving:  # so that no piece is moved twice
            return await self._move_next(store, turns)

    async def _move_next(self, store: RecordStore, turns: Sequence[Hashable]) -> bool:
        found = dict.fromkeys(piece for turn in turns for piece in self._turns.in_memory(turn))
        pieces = {piece: self._new_records(piece) for piece in found}
        are_kept = False
        try:
            are_kept = await self._write_all(store, self._batches(pieces))
        finally:
            for piece, records in pieces.items():
                if are_kept:
                    self._turns.note_stored(piece, records)
                else:
                    store.forget(records.keys)  # no note names them
        if are_kept:
            for turn in turns:
                self._turns.leave(turn)
        return are_kept

    def _drop(self, store: RecordStore, turns: Sequence[Hashable]) -> None:
        """Drop the rows of ``turns``, which could not be kept."""
        logger.error(
            "the rows of %d answers could not be kept within %g s: they are dropped",
            len(turns),
            store.wait_s,
        )
        for turn in turns:
            self._turns.drop_unstored(turn, reasons.NOT_KEPT)

    def _new_records(self, piece: Piece) -> StoredAs:
        rows = piece.rows_per_record
        first, self._next = self._next, self._next + -(-piece.length // rows)
        keys = (self._prefix + number.to_bytes(8, "big") for number in range(first, self._next))
        return StoredAs(tuple(keys), rows)

    def _batches(self, pieces: Mapping[Piece, StoredAs]) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the records of ``pieces``, as pairs of key and content, about ``_BATCH_BYTES`` at a time."""
        batch: list[tuple[bytes, bytes]] = []
        size = 0
        for piece, (keys, per_record) in pieces.items():
            rows = piece.rows
            assert rows is not None  # narrowing: no other task moves rows meanwhile
            for place, key in enumerate(keys):
                content = rows[place * per_record : (place + 1) * per_record].tobytes()
                batch.append((key, content))
                size += len(content)
                if size >= _BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
        yield batch

    async def _write_all(self, store: RecordStore, batches: Iterator[list[tuple[bytes, bytes]]]) -> bool:
        for batch in batches:
            if not await self._write(store, batch):
                return False
        return True

    async def _write(self, store: RecordStore, records: list[tuple[bytes, bytes]]) -> bool:
        """Write ``records``, and try again after a failure. Returns False if they are not kept within ``wait_s``."""
        pause = _PAUSE_S
        with anyio.move_on_after(store.wait_s):
            while True:
                try:
                    await store.keep(records)
                    return True
                except Exception as error:
                    if not self._has_failed:
                        logger.warning(
                            "the store failed to keep rows (further failures are not logged): %r", error
                        )
                    self._has_failed = True
                await anyio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
        return False

    def _forget(self, keys: Sequence[bytes]) -> None:
        """Delete the records of ``keys``. In a shared store, delete only those that this run has written."""
        assert self._store is not None  # narrowing: the store has these records
        if self._store.is_shared:
            self._store.unlearn([key for key in keys if not key.startswith(self._prefix)])
            keys = [key for key in keys if key.startswith(self._prefix)]
        if self.drop_noted is None:
            self._store.forget(keys)
        elif keys:
            self.drop_noted(keys)
