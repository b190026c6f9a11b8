"""Records that were kept, but are in no tier any more, or are damaged."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Container, Sequence
from typing import TypeVar

import anyio

from router_core.errors import StartupError
from slime_tiered_store.errors import RecordLost, StoreError

__all__ = ["RecordLosses"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_MISSING, _DAMAGED = "no tier has it intact", "is damaged"


class RecordLosses:
    """Decides which missing records are lost, and counts the lost and the damaged records.

    ``kept``: the keys of the records that should be there. If ``stops`` is True, losses at the start raise
    StartupError, and the first later loss makes :meth:`stop` raise RecordLost. If ``stops`` is False, losses are
    counted and logged as errors; of the losses after the start, only the first one is logged. ``place()`` returns the
    place of the records, and ``session_of(key)`` the session of a record, both for messages.
    """

    def __init__(
        self, kept: Container[bytes], *, stops: bool, place: Callable[[], str],
        session_of: Callable[[bytes], str | None],
    ) -> None:  # fmt: skip
        self.count = 0
        self._kept = kept
        self._stops = stops
        self._place = place
        self._session_of = session_of
        self._is_any = anyio.Event()
        self._first = ""

    async def found(
        self,
        key: bytes,
        read: Callable[[], Awaitable[_T | None]],
        was_deleted: Callable[[bytes], Awaitable[bool]] | None,
    ) -> _T | None:
        """Return the result of ``read()``, which reads the record of ``key``. If the record is lost, count it.

        ``was_deleted``: see ColdStore; None if no other router deletes records. Raises StoreError if ``read`` or
        ``was_deleted`` fails: then it is not known if the record is lost.
        """
        found = await read()
        if found is not None or key not in self._kept:
            return found
        if was_deleted is not None:
            if await _answer(was_deleted(key)):
                return None
            # Another router may have written the record after the first read, and the note about it before was_deleted
            # read the notes. If the second read misses the record, too, it was deleted meanwhile, or it is lost.
            found = await read()
            if found is not None or await _answer(was_deleted(key)):
                return found
        if key in self._kept:
            self._add(key, _MISSING)
        return None

    def damaged(self, key: bytes) -> None:
        """Count the record of ``key`` as lost: a tier has it, but its content is damaged."""
        if key in self._kept:
            self._add(key, _DAMAGED)

    def _add(self, key: bytes, reason: str) -> None:
        self.count += 1
        if self._is_any.is_set():
            return
        session = self._session_of(key)
        of = f" of session {session!r}" if session is not None else ""
        self._first = f"{self._place()}: the record {key.hex()}{of} was kept, and {reason}"
        if not self._stops:
            logger.error("%s (further losses are only counted)", self._first)
        self._is_any.set()

    def at_start(self, gone: Collection[bytes], known: int) -> None:
        """Count the records of the keys ``gone`` as lost. ``known``: the number of records that the log names.

        If ``stops`` is True, raises StartupError instead. Losses at the start do not make :meth:`stop` raise.
        """
        if not gone:
            return
        found = (
            f"{self._place()}: {len(gone)} of {known} records of earlier runs are lost: "
            "some of their blocks are in no tier"
        )
        if self._stops:
            raise StartupError(
                f"{found}; give all directories and stores that the earlier router had, or --store-on-loss mark "
                "to start without these records: sessions without all of their tokens are then marked as not complete"
            )
        self.count += len(gone)
        logger.error("%s; sessions without all of their tokens are marked as not complete", found)

    def without_notes(self, blocks: int) -> None:
        """Count one loss if earlier runs left ``blocks`` blocks, but no notes about the records of these blocks.

        If ``stops`` is True, raises StartupError instead. If ``blocks`` is 0, nothing is lost.
        """
        if not blocks:
            return
        found = f"{self._place()}: there are {blocks} blocks of earlier runs, and no notes about them"
        if self._stops:
            raise StartupError(
                f"{found}; give all directories and stores that the earlier router had, or another directory, or "
                "--store-on-loss mark to drop these blocks"
            )
        self.count += 1
        logger.error("%s: the blocks are dropped, and all records of earlier runs are lost", found)

    def in_notes(self, damage: Sequence[str]) -> None:
        """Count each damaged note as a loss, since its records are not known. ``damage``: place and reason of each."""
        self.count += len(damage)
        for each in damage:
            logger.error(
                "a damaged note is left out: %s; it is not known which records are lost, so no session of earlier "
                "runs is complete",
                each,
            )

    async def stop(self) -> None:
        """Wait for the first loss after the start, then raise RecordLost. Run this in the background.

        The error ends the router.
        """
        await self._is_any.wait()
        raise RecordLost(self.count, self._first)


async def _answer(question: Awaitable[bool]) -> bool:
    try:
        return await question
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"a record is missing, and it is not known if it was deleted: {error}") from error
