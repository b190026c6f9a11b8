"""Records that were kept, but are in no tier any more."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container
from typing import TypeVar

import anyio

from slime_tiered_store.errors import RecordLost, StoreError

__all__ = ["RecordLosses"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class RecordLosses:
    """Decides which missing records are lost, and counts them. The first loss is logged as an error.

    ``kept``: the keys of the records that should be there.
    """

    def __init__(self, kept: Container[bytes]) -> None:
        self.count = 0
        self._kept = kept
        self._is_any = anyio.Event()

    async def found(
        self,
        key: bytes,
        read: Callable[[], Awaitable[_T | None]],
        was_deleted: Callable[[bytes], Awaitable[bool]] | None,
    ) -> _T | None:
        """Return the result of ``read()``, which reads the record of ``key``. If the record is lost, count it.

        ``was_deleted``: see ColdStore; None if no other router deletes records. Raises StoreError if ``read`` or
        ``was_deleted`` fails: then nobody knows if the record is lost.
        """
        found = await read()
        if found is not None or key not in self._kept:
            return found
        if was_deleted is not None:
            if await _answer(was_deleted(key)):
                return None
            # Another router may have written the record after the first read, and noted that before was_deleted read
            # the notes. If the second read misses the record, too, it was deleted meanwhile, or it is lost.
            found = await read()
            if found is not None or await _answer(was_deleted(key)):
                return found
        if key in self._kept:
            self._add(key)
        return None

    def _add(self, key: bytes) -> None:
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


async def _answer(question: Awaitable[bool]) -> bool:
    try:
        return await question
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"a record is missing, and it is not known if it was deleted: {error}") from error
