"""Consecutive rows that are kept together, in memory or in a store."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Self

import numpy as np
from xxhash import xxh3_128_digest

from slime_sglang.token_arrays import IntArray

__all__ = ["Part", "Piece", "StoredAs"]

#: Usual size of a record in bytes. A record has whole rows. Records are small, so that reading takes little memory.
_RECORD_BYTES = 1 << 20


class StoredAs(NamedTuple):
    """The records of a piece, in order: their keys, and the number of rows in each. The last record may have fewer."""

    keys: tuple[bytes, ...]
    rows: int


class Piece:
    """Consecutive rows of one turn, or of several turns that share them: ``[length, size]``. They never change.

    ``users``: the number of turns that have the rows, plus the number of calls that read them from the store now.
    ``rows`` is None once the rows are in the store, in ``records``. ``key`` is None, except for a head (see
    ``turn_rows``), which other turns may share: then it is the turn's prompt and the first row's place in the context.
    """

    __slots__ = ("_digest", "dtype", "key", "length", "records", "rows", "size", "users")

    def __init__(self, rows: IntArray, key: Hashable = None) -> None:
        self.rows: IntArray | None = rows
        self.length: int = rows.shape[0]
        self.size: int = rows.shape[1]
        self.dtype: np.dtype[np.integer[Any]] = rows.dtype
        self.key = key
        self.users = 1
        self.records = StoredAs((), 1)
        self._digest = b""

    @classmethod
    def stored(cls, length: int, size: int, dtype: str, records: StoredAs) -> Self:
        """Return the piece ``[length, size]`` that is in ``records``."""
        piece = cls(np.empty((0, size), dtype))
        piece.length, piece.rows, piece.records = length, None, records
        return piece

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.size * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.length * self.row_bytes

    @property
    def rows_per_record(self) -> int:
        """Usual number of rows in a record."""
        return max(1, _RECORD_BYTES // max(1, self.row_bytes))

    @property
    def record_sizes(self) -> list[tuple[bytes, int]]:
        """The key of each record, and the size of the record in bytes."""
        return [self.record_at(row) for row in range(0, self.length, self.records.rows)]

    def record_at(self, row: int) -> tuple[bytes, int]:
        """Return the key and the size in bytes of the record that begins with ``row``."""
        keys, rows = self.records
        return keys[row // rows], min(rows, self.length - row) * self.row_bytes

    def leave_memory(self, records: StoredAs) -> None:
        """Note that the store has the rows in ``records``. O(rows)."""
        assert self.rows is not None  # narrowing: rows leave memory only once
        self._digest = _digest_of(self.rows)
        self.rows, self.records = None, records

    def equals(self, rows: IntArray) -> bool:
        """Return True if ``rows`` surely have the same shape and values. O(rows); reads nothing from the store."""
        if rows.shape != (self.length, self.size):
            return False
        if self.rows is not None:
            return _equal(self.rows, rows)
        # Equal rows of different types have different digests, so they are kept twice.
        return rows.dtype == self.dtype and _digest_of(rows) == self._digest


class Part(NamedTuple):
    """The first ``length`` rows of ``piece``, which belong to the turn ``response``.

    ``rows``: the piece's rows, if they were in memory when the part was found.
    """

    response: Hashable
    piece: Piece
    length: int
    rows: IntArray | None


def _digest_of(rows: IntArray) -> bytes:
    return xxh3_128_digest(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


def _equal(rows: IntArray, others: IntArray) -> bool:
    """Return True if both arrays, which must have the same shape, have the same values."""
    if rows.dtype != others.dtype or rows.nbytes % 8:
        return np.array_equal(rows, others)
    # Eight bytes at a time: np.array_equal makes an array with a result for each value that it compares.
    return np.array_equal(rows.reshape(-1).view(np.uint64), others.reshape(-1).view(np.uint64))
