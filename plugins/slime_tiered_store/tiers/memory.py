"""The memory tier: one arena of blocks, allocated at once."""

from __future__ import annotations

import mmap
from contextlib import suppress

from slime_tiered_store.errors import NotEnoughSpaceError

__all__ = ["MemoryArena"]


class MemoryArena:
    """``capacity`` blocks of ``block_bytes`` bytes in one anonymous mapping, which begins at a page.

    The system reserves the addresses at once, and gives pages at their first use. Copies into a view run at the
    speed of memcpy. Raises NotEnoughSpaceError when the system refuses the mapping.
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

    def view(self, block_id: int) -> memoryview:
        """Return the writable bytes of a block: ``block_bytes`` long, valid until ``aclose``. Raises IndexError."""
        if not 0 <= block_id < self.capacity:
            raise IndexError(f"tier {self.name} has the blocks 0 to {self.capacity - 1}, not {block_id}")
        start = block_id * self.block_bytes
        return self._bytes[start : start + self.block_bytes]

    async def aclose(self) -> None:
        """Release the arena. Memory that views still refer to is released with them."""
        self._bytes.release()
        with suppress(BufferError):  # a view is left; the mapping ends with it
            self._arena.close()
