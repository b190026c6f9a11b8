"""The pieces of a body: bytes, and rows that are read when it is their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from slime_rows.rows import Rows

if TYPE_CHECKING:
    from slime_sglang.token_arrays import IntArray

__all__ = ["BodyLength", "Data", "Piece", "RowPiece", "joined"]

Data = bytes | memoryview


class BodyLength(int):
    """The number of bytes of all further pieces. Only the first piece of a body may be a BodyLength."""


class RowPiece(NamedTuple):
    """Known ``rows`` at their place in a body. ``encode`` is called with rows, in order, and returns their bytes."""

    rows: Rows
    encode: Callable[[IntArray], Iterable[Data]]


Piece = BodyLength | Data | RowPiece


def joined(pieces: Iterable[Piece]) -> bytes:
    """Return the bytes of ``pieces``. None of them may be a RowPiece."""
    return b"".join(piece for piece in pieces if isinstance(piece, bytes | memoryview))
