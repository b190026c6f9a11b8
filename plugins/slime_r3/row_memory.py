"""The memory that rows of all kinds share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from slime_r3.turn_rows import TurnRows

__all__ = ["RowMemory"]


class RowMemory:
    """A limit of ``max_bytes`` (0: no limit) for the rows of all ``kinds`` together.

    ``on_full``: functions to call when memory has too many rows. With a store there is one function for each kind,
    which wakes the task that moves the oldest rows of this kind. Without a store there is no function, and the oldest
    rows of all kinds are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.kinds: list[TurnRows] = []
        self.on_full: list[Callable[[], None]] = []
        self._ages = count()
        self._progress = anyio.Event()

    def age(self) -> int:
        """Return a number that is larger than those returned before."""
        return next(self._ages)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows in memory."""
        return sum(kind.size_bytes for kind in self.kinds)

    def exceeds(self, less: int = 0) -> bool:
        """Return True if the rows in memory exceed the limit by more than ``less`` bytes."""
        return bool(self.max_bytes) and self.size_bytes - less > self.max_bytes

    @property
    def is_crowded(self) -> bool:
        """True if the limit is exceeded by more than a quarter."""
        return self.exceeds(self.size_bytes // 5)

    def make_room(self) -> None:
        """If memory has too many rows, drop the oldest, or start to move them to the store."""
        while self.exceeds():
            if self.on_full:
                for wake in self.on_full:
                    wake()
                return
            min(self.kinds, key=lambda kind: kind.oldest).drop_oldest()

    def has_progressed(self) -> None:
        """Note that rows have left memory, so that :meth:`room` looks again."""
        self._progress.set()
        self._progress = anyio.Event()

    async def room(self, wait_s: float) -> None:
        """Wait while memory is crowded, but at most ``wait_s`` seconds."""
        if self.is_crowded:
            with anyio.move_on_after(wait_s):
                while self.is_crowded:
                    await self._progress.wait()
