"""The numbered batches of one publisher. A missing batch puts the worker's blocks out of sync with its engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from slime_policies.kv_events.batches import Cleared, MalformedBatch, read_batch
from slime_policies.kv_events.blocks import OutOfSync, WorkerBlocks

__all__ = ["EventStream", "Tally"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """Counts of all workers since the start. ``dropped``: how often all blocks of a worker were dropped."""

    batches: int = 0
    replayed: int = 0
    malformed: int = 0
    dropped: int = 0


class EventStream:
    """The batches of one connection to a publisher. ``next``: the number of the next batch.

    The blocks are in sync from batch 0 on, or from the first event that says that the engine has no blocks. The blocks
    stay in sync until a batch is missing or malformed, or cannot be applied (OutOfSync). Then the blocks are dropped.
    """

    def __init__(self, name: str, blocks: WorkerBlocks, tally: Tally) -> None:
        self._name = name
        self._blocks = blocks
        self._tally = tally
        self.next = 0
        #: The number of the last live batch, which is a batch that did not come from a replay.
        self._last_live = -1
        self.forget()

    def note_live(self, number: int) -> bool:
        """Note that the live batch ``number`` came. Return True when batches before it are missing."""
        if number <= self._last_live:
            self._drop(f"its batches start again, at {number}")
            self.next = 0
        self._last_live = number
        return number > self.next

    def apply(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply a batch. Yield after each event, so that the caller can give other tasks a turn.

        Batches between ``next`` and ``number`` are lost. A batch before ``next`` was applied or lost, and is ignored.
        """
        if number < self.next:
            return
        if number > self.next:
            self._drop(f"batches {self.next} to {number - 1} are missing")
        self.next = number + 1
        self._tally.batches += 1
        blocks = self._blocks
        if number == 0:
            blocks.clear()
            self._trust()
        try:
            for event in read_batch(payload):
                if isinstance(event, Cleared):
                    self._trust()
                if blocks.is_in_sync:
                    blocks.apply(event)
                    yield
        except MalformedBatch as error:
            self._tally.malformed += 1
            self._drop(f"batch {number} is malformed: {error}")
        except OutOfSync as error:
            self._drop(str(error))

    def _trust(self) -> None:
        if not self._blocks.is_in_sync:
            self._blocks.is_in_sync = True
            logger.info("the cache of %s is known from its KV events", self._name)

    def _drop(self, reason: str) -> None:
        if self._blocks.is_in_sync:
            self.forget()
            self._tally.dropped += 1
            logger.warning("the cache of %s is no longer known from its KV events: %s", self._name, reason)

    def end(self) -> None:
        """Drop the blocks: the connection has ended, and perhaps the engine has, too."""
        self._drop("the connection has ended")

    def forget(self) -> None:
        """Drop the blocks without a warning: the worker's events are not followed any more."""
        self._blocks.is_in_sync = False
        self._blocks.clear()
