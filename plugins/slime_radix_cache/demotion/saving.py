"""Saver of segments, and of other records, in the store and its log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from slime_radix_cache.cold_store import ColdStore
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.entry_notes import note_of
from slime_radix_cache.demotion.note_writer import NoteWriter
from slime_radix_cache.index.segments import Segment

__all__ = ["SegmentSaver"]

logger = logging.getLogger(__name__)

#: The first and the longest wait, in seconds, before a failed write is repeated. Waits double up to the longest.
_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0


class SegmentSaver:
    """Saves segments of ``demotion`` to ``store``.

    ``failures`` counts by kind: failed calls of the store, unreadable notes about rows, and writes that were given up.
    """

    def __init__(self, store: ColdStore, demotion: Demotion) -> None:
        self.failures: Counter[str] = Counter()
        self.writer = NoteWriter(store, lambda error: self.failed("note", error))
        self._store = store
        self._demotion = demotion

    async def save(self, segments: Sequence[Segment]) -> bool:
        """Put ``segments``, and unsaved segments before them, into the store and its log. Retry after failures.

        Returns False if the store's ``wait_s`` was too short.
        """
        demotion, memory = self._demotion, self._demotion.memory
        unsaved = memory.unsaved(segments)
        new = [demotion.record(one) for one in unsaved if not demotion.is_stored(one)]
        with anyio.move_on_after(self._store.wait_s):
            if new:
                await self._keep([(demotion.runs.key(serial), content) for serial, content in new])
            for serial, content in new:
                demotion.note_stored(serial, len(content))
            there = [one for one in unsaved if one in memory.serials]
            entries = [memory.entry_of(one) for one in there]
            self.writer.add(*(note_of(entry, demotion.runs) for entry in entries))
            for one in there:
                demotion.grown.note(one)
            await self.writer.flush()
            for entry in entries:
                memory.save(entry)
            return True
        self.failures["lost"] += 1
        if self.failures["lost"] == 1:
            logger.error(
                "%d recorded segments could not be kept within %g s: their sessions are not complete "
                "(further losses are only counted)",
                len(unsaved),
                self._store.wait_s,
            )
        return False

    async def save_records(
        self, pairs: Sequence[tuple[bytes, bytes]], noted: Callable[[bytes, int], Any]
    ) -> bool:
        """Put the records ``pairs`` (key and content) into the store and its log. Retry after failures.

        ``noted(key, size)`` is called for each stored record, and returns a note for the log. Returns False if the
        store's ``wait_s`` was too short.
        """
        with anyio.move_on_after(self._store.wait_s):
            await self._keep(pairs)
            self.writer.add(*(noted(key, len(content)) for key, content in pairs))
            await self.writer.flush()
            return True
        return False

    async def _keep(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write records; retry until that succeeds."""
        pause = _PAUSE_S
        while True:
            try:
                await self._store.keep(pairs)
            except Exception as error:
                self.failed("keep", error)
                await anyio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
            else:
                return

    def failed(self, kind: str, error: Exception) -> None:
        """Count a failed call, and log the first of its ``kind``."""
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            logger.warning(
                "a call of the store of trajectories failed, kind %r (further failures are only counted): %r",
                kind,
                error,
            )
