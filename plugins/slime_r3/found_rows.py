"""Rows that were found, and are not read yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_r3.cold_rows import ColdRows
from slime_r3.turn_rows import Part
from slime_sglang.token_arrays import IntArray

__all__ = ["FoundRows"]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows of one context in ``parts``, which have the ``shape`` ``[tokens, layers, top_k]`` or ``[tokens, size]``."""

    shape: tuple[int, ...]
    parts: list[Part]
    cold: ColdRows

    async def read(self) -> IntArray | str:
        """See slime_radix_cache.contracts.FoundRows. O(rows)."""
        rows = await self.cold.read(self.parts) if self.parts else np.empty(0, np.uint8)
        return rows if isinstance(rows, str) else rows.reshape(self.shape)
