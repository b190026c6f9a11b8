"""Arrays of answers, and the pieces of a body: bytes, and rows that are read when it is their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slime_radix_cache.retrieval.token_rows import Rows
from slime_sglang.token_arrays import IntArray

__all__ = ["Data", "Member", "Piece", "RowPiece", "raw_bytes"]

Data = bytes | memoryview


class RowPiece(NamedTuple):
    """The place of ``rows`` in a body. ``encode`` returns the bytes of the next rows, which come in order."""

    rows: Rows
    encode: Callable[[IntArray], Iterable[Data]]


Piece = Data | RowPiece


@dataclass(frozen=True, slots=True)
class Member:
    """A named array, in ``parts`` that are joined along their first axis. At least one part is not empty, or all."""

    name: str
    parts: Sequence[npt.NDArray[Any] | Rows]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds all values."""
        return np.result_type(*(_source(part).dtype for part in self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the joined array. An empty part may not know the shape of a row."""
        shapes = [_source(part).shape for part in self.parts]
        longest = max(shapes, key=lambda shape: shape[0])
        return (sum(shape[0] for shape in shapes), *longest[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return prod(self.shape) * self.dtype.itemsize

    def pieces(self, write: Callable[[Data], Iterable[Data]] = lambda data: (data,)) -> Iterator[Piece]:
        """Yield all values in C order, each piece as ``write`` returns it."""
        kind = self.dtype

        def encode(values: npt.NDArray[Any]) -> Iterable[Data]:
            return write(raw_bytes(values.astype(kind, copy=False)))

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
