"""Backpressure: a limit on the bytes of writes under way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from slime_tiered_store.errors import TierBusy
from slime_tiered_store.tiers.counts import TierCounts

__all__ = ["WriteLimit"]


class WriteLimit:
    """Limits the writes under way to ``max_bytes`` in total. Further writes wait up to ``wait_s`` seconds, in order.

    A write that is larger than the limit begins when no other write is under way.
    """

    def __init__(self, tier: str, location: str, max_bytes: int, wait_s: float, counts: TierCounts) -> None:
        self._tier = tier
        self._location = location
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._counts = counts
        self._waiting: list[tuple[int, anyio.Event]] = []

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Count ``size`` bytes as under way. Raises TierBusy when there was no room in time."""
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._counts.pending_bytes += size
        try:
            yield
        finally:
            self._counts.pending_bytes -= size
            self._let_in()

    def _fits(self, size: int) -> bool:
        pending = self._counts.pending_bytes
        return not pending or pending + size <= self._max_bytes

    async def _wait(self, size: int) -> None:
        turn = (size, anyio.Event())
        self._waiting.append(turn)
        self._counts.waits += 1
        began = time.monotonic()
        try:
            with anyio.fail_after(self._wait_s):
                await turn[1].wait()
        except BaseException as error:
            if turn[1].is_set():
                self._counts.pending_bytes -= size
            else:
                self._waiting.remove(turn)
            self._let_in()
            if isinstance(error, TimeoutError):
                self._counts.refused += 1
                free = max(0, self._max_bytes - self._counts.pending_bytes)
                raise TierBusy(
                    self._tier, self._location, size, free, self._wait_s, len(self._waiting)
                ) from None
            raise
        finally:
            self._counts.waited_s += time.monotonic() - began

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, event = self._waiting.pop(0)
            self._counts.pending_bytes += size
            event.set()
