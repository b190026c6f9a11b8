"""A count of the records that were kept, but are in no tier any more."""

from __future__ import annotations

import logging

import anyio

from slime_tiered_store.errors import RecordLost

__all__ = ["RecordLosses"]

logger = logging.getLogger(__name__)


class RecordLosses:
    """The number of lost records since the start. The first loss is logged as an error."""

    def __init__(self) -> None:
        self.count = 0
        self._is_any = anyio.Event()

    def add(self, key: bytes) -> None:
        """Count the record of ``key``."""
        self.count += 1
        if self.count == 1:
            logger.error(
                "the record %s was kept, and is in no tier (further losses are only counted)", key.hex()
            )
        self._is_any.set()

    async def stop(self) -> None:
        """Wait for the first loss, then raise RecordLost. Run this in the background: the error ends the router."""
        await self._is_any.wait()
        raise RecordLost
