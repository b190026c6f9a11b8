"""Rows that were found, and are not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_r3.pieces import Part
from slime_r3.reading import RowReader, TakeRows
from slime_r3.turn_rows import TurnRows

__all__ = ["FoundRows"]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of one context, in ``parts``. For the methods see slime_rows.rows.FoundRows.

    ``shape``: of all rows together, ``[tokens, layers, top_k]``, or ``[tokens, size]`` if the number of layers is not
    known.
    """

    shape: tuple[int, ...]
    parts: Sequence[Part]
    turns: TurnRows
    reader: RowReader

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """The widest type of the parts, so that it holds all values; uint8 without parts."""
        return (
            np.result_type(*(part.piece.dtype for part in self.parts)) if self.parts else np.dtype(np.uint8)
        )

    def held(self) -> AbstractContextManager[None]:
        """Keep the store from deleting the rows within the ``with``."""
        return self.turns.held(self.parts)

    async def check(self) -> str | None:
        """Return the reason if rows are known to be lost, else None. Reads only rows that seem lost."""
        return await self.reader.check(self.parts)

    async def stream(self, take: TakeRows) -> str | None:
        """Call ``take`` with about 1 MiB of rows at a time. Return the reason if rows are lost. O(rows)."""
        return await self.reader.stream(self.parts, take)
