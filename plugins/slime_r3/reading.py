"""Reading of rows from memory and from a store, a record at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
from anyio.abc import TaskGroup

from router_core.errors import HTTPError
from slime_r3 import reasons
from slime_r3.pieces import Part
from slime_r3.record_store import RecordStore
from slime_r3.turn_rows import TurnRows
from slime_rows.side_tasks import side_tasks
from slime_sglang.token_arrays import IntArray

__all__ = ["RowReader", "StoreFailed", "TakeRows"]

#: The number of records that are read at the same time. Memory has their rows, and the rows that ``take`` got last.
_AT_ONCE = 2

#: Takes rows ``[some, row size]``, and returns when it is ready for the next rows.
TakeRows = Callable[[IntArray], Awaitable[None]]


class StoreFailed(HTTPError):
    """Rows cannot be read from their store now."""

    status, type, code = 503, "service_unavailable", "STORE_FAILED"


class _Chunk(NamedTuple):
    """The rows of ``part`` from ``start`` to before ``end``: one record, or as many rows in memory as a record has."""

    part: Part
    start: int
    end: int

    @property
    def in_memory(self) -> IntArray | None:
        """The rows, if they are in memory."""
        return self.part.rows[self.start : self.end] if self.part.rows is not None else None


class RowReader:
    """Reads the rows of ``turns``. ``store``: the store of the rows that are not in memory; None without a store."""

    def __init__(self, turns: TurnRows) -> None:
        self.store: RecordStore | None = None
        self._turns = turns

    async def check(self, parts: Sequence[Part]) -> str | None:
        """Return the reason if rows of ``parts`` are known to be lost, else None.

        Reads only rows of which the store says that it does not hold them. Raises StoreFailed.
        """
        for chunk in _chunks(parts):
            if chunk.in_memory is not None:
                continue
            if not await self._holds(chunk) and await self._rows(chunk) is None:
                return self._lose(chunk)
            await anyio.lowlevel.checkpoint()  # a long sample has many records
        return None

    async def stream(self, parts: Sequence[Part], take: TakeRows) -> str | None:
        """Call ``take`` with the rows of ``parts``, in order. Raises StoreFailed, and the errors of ``take``.

        Stops at the first record that is lost, and returns the reason. Returns None after the last rows. While ``take``
        runs, the next record is read.
        """
        async with side_tasks() as tasks:
            return await self._stream(parts, take, tasks)

    async def _stream(self, parts: Sequence[Part], take: TakeRows, tasks: TaskGroup) -> str | None:
        ahead: deque[tuple[_Chunk, _Reading | None]] = deque()
        chunks = _chunks(parts)
        while True:
            while len(ahead) < _AT_ONCE and (chunk := next(chunks, None)) is not None:
                reading = None
                if chunk.in_memory is None:
                    reading = _Reading()
                    tasks.start_soon(reading.run, self._rows, chunk)
                ahead.append((chunk, reading))
            if not ahead:
                return None
            chunk, reading = ahead.popleft()
            rows = chunk.in_memory if reading is None else await reading.result()
            if rows is None:
                return self._lose(chunk)
            await take(rows)

    def _lose(self, chunk: _Chunk) -> str:
        self._turns.lose(chunk.part, reasons.NOT_IN_STORE)
        return reasons.NOT_IN_STORE

    async def _holds(self, chunk: _Chunk) -> bool:
        """Return False if the record of ``chunk`` seems to be lost. Only :meth:`_rows`, which reads it, can be sure."""
        store, key = self._record(chunk)
        try:
            return await store.holds(key)
        except Exception as error:
            raise _failed(error) from error

    async def _rows(self, chunk: _Chunk) -> IntArray | None:
        """Return the rows of ``chunk`` from the store; None if they are lost. Raises StoreFailed."""
        store, key = self._record(chunk)
        piece = chunk.part.piece
        rows: IntArray = np.empty((chunk.end - chunk.start, piece.size), piece.dtype)
        try:
            is_found = await store.read(key, rows.reshape(-1).view(np.uint8).data)
        except Exception as error:
            raise _failed(error) from error
        return rows if is_found else None

    def _record(self, chunk: _Chunk) -> tuple[RecordStore, bytes]:
        """Return the store and the key of the record of ``chunk``."""
        store, piece = self.store, chunk.part.piece
        assert store is not None  # narrowing: it has the rows
        key, size = piece.record_at(chunk.start)
        if store.is_shared and piece.users:  # without users, the records may be deleted
            store.learn({key: size})
        return store, key


class _Reading:
    """Rows that a separate task reads."""

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._rows: IntArray | None = None
        self._error: Exception | None = None

    async def run(self, read: Callable[[_Chunk], Awaitable[IntArray | None]], chunk: _Chunk) -> None:
        """Call ``read`` for ``chunk``."""
        try:
            self._rows = await read(chunk)
        except Exception as error:
            self._error = error
        self._ended.set()

    async def result(self) -> IntArray | None:
        """Return what ``read`` returned, or raise its error."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._rows


def _chunks(parts: Sequence[Part]) -> Iterator[_Chunk]:
    for part in parts:
        step = part.piece.rows_per_record if part.rows is not None else part.piece.records.rows
        for start in range(0, part.length, step):
            yield _Chunk(part, start, min(start + step, part.length))


def _failed(error: Exception) -> StoreFailed:
    return StoreFailed(f"the store of recorded rows does not answer: {error}")
