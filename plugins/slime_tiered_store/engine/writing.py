"""A transfer from memory to a lower tier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.engine.plans import Plan
from slime_tiered_store.errors import ResetMeanwhile
from slime_tiered_store.frames import Layout
from slime_tiered_store.index import MatchResult, RadixNode
from slime_tiered_store.transfers import TransferOp, TransferType

__all__ = ["WriteOp"]


class WriteOp:
    """Writes those blocks of a plan that a tier lacks. In the tier's index they are unready until they are durable.

    The memory of the frames is locked meanwhile. If the constructor raises ``NotEnoughSpaceError``, nothing is locked.
    """

    def __init__(
        self, plan: Plan, layout: Layout, engine: CacheEngine, match_result: MatchResult,
        note_loss: Callable[[CacheEngine, RadixNode, int], None],
    ) -> None:  # fmt: skip
        self._plan = plan
        self._layout = layout
        self._engine = engine
        start = match_result.num_matched_blocks
        ids = engine.take(plan.num_blocks - start, match_result.last_node, partial(note_loss, engine))
        # an earlier process may have left other rows under these keys
        engine.recycle_blocks(engine.claim(plan.sequence_meta.keys(start, plan.num_blocks)))
        self._leaf = engine.insert(plan.sequence_meta, ids, match_result)
        self._blocks = self._leaf.blocks()
        self._frames = plan.frames[start:]
        self._memory_node = plan.lock()

    def undo(self) -> None:
        """Release what the operation holds. Call this if the operation is never submitted."""
        self._plan.memory.unlock_node(self._memory_node)
        self._engine.discard(self._leaf)

    def op(self, transfer_type: TransferType) -> TransferOp:
        """Return the operation for a graph."""
        return TransferOp(transfer_type, self._blocks, self._frames, self._end)

    def _end(self, error: Exception | None) -> Exception | None:
        if error is not None:
            self._engine.discard(self._leaf)
        elif not self._engine.set_ready(self._leaf, self._layout.checksums_of(self._frames)):
            error = ResetMeanwhile(self._engine.name)
        else:
            self._engine.num_demoted_blocks += len(self._blocks)
        self._plan.outcomes[self._engine.name] = error
        self._plan.memory.unlock_node(self._memory_node)
        return error
