"""The named arrays of a file that is written piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_rows.body_pieces import Data, Piece, RowPiece
from slime_rows.rows import Rows

__all__ = ["Member", "raw_bytes"]

#: How many bytes are encoded at once.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A named array, in ``parts`` that are joined along their first axis. Parts that are ``Rows`` have ``found`` set.

    ``kind``: the type of the values; None for the narrowest type that can hold the values of each part's type.
    """

    name: str
    parts: Sequence[npt.NDArray[Any] | Rows]
    kind: np.dtype[Any] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        if self.kind is not None:
            return self.kind
        return np.result_type(*(_source(part).dtype for part in self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the joined array. The longest part gives the shape of a row: an empty part may have another."""
        shapes = [_source(part).shape for part in self.parts]
        longest = max(shapes, key=lambda shape: shape[0])
        return (sum(shape[0] for shape in shapes), *longest[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return prod(self.shape) * self.dtype.itemsize

    def pieces(self, write: Callable[[Data], Iterable[Data]] = lambda data: (data,)) -> Iterator[Piece]:
        """Yield all values in C order, encoded by ``write``. A RowPiece encodes its rows only when they are read."""
        kind = self.dtype
        step = _BLOCK_BYTES // kind.itemsize

        def encode(values: npt.NDArray[Any]) -> Iterator[Data]:
            flat = values.reshape(-1)
            # All values at once, as a wider ``kind``, would take several times their memory.
            for start in range(0, len(flat), step):
                yield from write(raw_bytes(flat[start : start + step].astype(kind, copy=False)))

        for part in self.parts:
            if isinstance(part, Rows):
                yield RowPiece(part, encode)
            else:
                yield from encode(part)


def raw_bytes(values: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of ``values`` in C order, without a copy if they are in this order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _source(part: npt.NDArray[Any] | Rows) -> Any:
    return part.found if isinstance(part, Rows) else part
