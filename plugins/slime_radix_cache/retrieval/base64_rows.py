"""Rows as base64 in JSON, made piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import pybase64

from slime_radix_cache.retrieval.npz import npy_head
from slime_radix_cache.retrieval.token_rows import NPY
from slime_rows.body_pieces import Data, Piece, RowPiece
from slime_rows.members import raw_bytes
from slime_rows.rows import Rows
from slime_sglang.token_arrays import IntArray

__all__ = ["rows_as_text"]

#: How many values are encoded at once.
_BLOCK = 1 << 18


class _Base64:
    """Base64 of bytes that come in pieces. Three bytes are four characters, so up to two bytes are held back."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: Data) -> bytes:
        """Return the next characters."""
        data = b"".join((self._rest, data))
        whole = len(data) // 3 * 3
        self._rest = data[whole:]
        return pybase64.b64encode(memoryview(data)[:whole])

    def end(self) -> bytes:
        """Return the last characters."""
        return pybase64.b64encode(self._rest)


def rows_as_text(rows: Rows, form: str) -> Iterator[Piece]:
    """Yield ``rows``, which are known, as a JSON string in ``form``."""
    assert rows.found is not None  # narrowing: the rows are known
    text = _Base64()
    kind = rows.found.dtype if form == NPY else "<i4"

    def encode(values: IntArray) -> Iterator[Data]:
        flat = values.reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            yield text.add(raw_bytes(flat[start : start + _BLOCK].astype(kind, copy=False)))

    yield b'"'
    if form == NPY:
        yield text.add(npy_head(rows.found.dtype, rows.found.shape))
    yield RowPiece(rows, encode)
    yield text.end() + b'"'
