"""The memory tier: one arena of blocks, allocated at once."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, pairwise

from slime_tiered_store.errors import NotEnoughSpaceError
from slime_tiered_store.tier import check_ids, ends_of_runs

__all__ = ["MemoryArena"]


class MemoryArena:
    """``capacity`` blocks of ``block_bytes`` bytes in one anonymous mapping at a page boundary.

    The system reserves the addresses at once, and gives pages at their first use. Raises NotEnoughSpaceError when the
    system refuses the mapping.
    """

    def __init__(self, capacity: int, block_bytes: int, name: str = "memory") -> None:
        self.name = name
        self.block_bytes = block_bytes
        self.capacity = capacity
        try:
            self._arena = mmap.mmap(-1, capacity * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise NotEnoughSpaceError(name, capacity, 0) from None
        with suppress(OSError):  # kernels without huge pages
            self._arena.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(self._arena)

    def stretches(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the writable bytes of the blocks: one view for each run of consecutive ids.

        The views are valid until ``aclose``. Raises IndexError.
        """
        ends = pairwise((0, *ends_of_runs(block_ids)))
        runs = [(block_ids[begin], block_ids[end - 1]) for begin, end in ends]
        check_ids(self.name, self.capacity, [*chain(*runs)])
        size = self.block_bytes
        return [self._bytes[first * size : (last + 1) * size] for first, last in runs]

    async def aclose(self) -> None:
        """Release the arena. Memory that views still refer to is released with them."""
        self._bytes.release()
        with suppress(BufferError):  # views still exist; the mapping ends with the last one
            self._arena.close()
