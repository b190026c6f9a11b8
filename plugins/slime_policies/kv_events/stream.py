"""The numbered batches of one publisher: which of them are missing, and whether the blocks are still true."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from slime_policies.kv_events.batches import Cleared, MalformedBatch, read_batch
from slime_policies.kv_events.blocks import Untrue, WorkerBlocks

__all__ = ["EventStream", "Tally"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """Counts since the start, of all workers. ``dropped``: times that the blocks of a worker were dropped."""

    batches: int = 0
    replayed: int = 0
    malformed: int = 0
    dropped: int = 0


class EventStream:
    """One connection to a publisher. ``next``: the number of the batch that comes next.

    The blocks are true from the first batch on (number 0), or from the moment when the engine says that it has no
    block. They stay true until a batch is missing or malformed; then they are dropped.
    """

    def __init__(self, name: str, blocks: WorkerBlocks, tally: Tally) -> None:
        self._name = name
        self._blocks = blocks
        self._tally = tally
        self.next = 0
        #: The number of the last batch that came from the publisher itself, not from a replay.
        self._last_live = -1
        self.forget()

    def is_missing(self, number: int) -> bool:
        """Take note that batch ``number`` came, not from a replay. Return True when others before it did not come."""
        if number <= self._last_live:
            self._drop(f"its batches start again, at {number}")
            self.next = 0
        self._last_live = number
        return number > self.next

    def apply(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply a batch; yields now and then, so that others can be given a turn.

        Batches between ``next`` and ``number`` are lost. A batch before ``next`` is known, and is ignored.
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
                if blocks.is_true:
                    blocks.apply(event)
                    yield
        except MalformedBatch as error:
            self._tally.malformed += 1
            self._drop(f"batch {number} is malformed: {error}")
        except Untrue as error:
            self._drop(str(error))

    def _trust(self) -> None:
        if not self._blocks.is_true:
            self._blocks.is_true = True
            logger.info("the cache of %s is known from its KV events", self._name)

    def _drop(self, reason: str) -> None:
        if self._blocks.is_true:
            self.forget()
            self._tally.dropped += 1
            logger.warning("the cache of %s is no longer known from its KV events: %s", self._name, reason)

    def end(self) -> None:
        """Drop the blocks: the connection has ended, and the engine with it, perhaps."""
        self._drop("the connection has ended")

    def forget(self) -> None:
        """Forget the blocks without a word: nobody follows the worker any more."""
        self._blocks.is_true = False
        self._blocks.clear()
