"""A transfer from a lower tier into memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.engine.plans import Plan
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, BlockReplaced
from slime_tiered_store.frames import CHECKSUM_BYTES, Layout
from slime_tiered_store.index import MatchResult, RadixNode
from slime_tiered_store.tier import Block
from slime_tiered_store.transfers import TransferOp, TransferType

__all__ = ["ReadOp"]

#: The id of a block that another process wrote to a shared tier: it takes no slot of this process.
_NO_SLOT = -1


class ReadOp:
    """Reads the blocks from ``start`` to ``stop`` of a plan, and verifies them.

    Meanwhile it locks the blocks that are in the index, and claims the blocks that an earlier process left. Claimed
    blocks enter the index afterwards if they continue a prefix that the index knows.
    """

    def __init__(
        self, plan: Plan, layout: Layout, engine: CacheEngine, match_result: MatchResult, start: int, stop: int,
        note_loss: Callable[[CacheEngine, RadixNode, int], None],
    ) -> None:  # fmt: skip
        self._plan = plan
        self._layout = layout
        self._engine = engine
        self._start = start
        self._known = match_result.num_ready_matched_blocks
        self._checksums = match_result.checksums()
        self._note_loss = note_loss
        self._epoch = engine.epoch
        self._node = match_result.last_ready_node
        engine.index.lock(self._node)
        self._blocks = match_result.blocks(start, min(stop, self._known))
        unknown = plan.sequence_meta.keys(max(start, self._known), stop)
        self._claimed = engine.begin_reading(unknown)
        self._blocks += self._claimed or [Block(_NO_SLOT, key) for key in unknown]
        plan.reads.append((engine, len(self._blocks)))

    def undo(self) -> None:
        """Release what the operation holds. Call this if the operation is never submitted."""
        self._engine.unlock_node(self._node)
        self._give_back(self._claimed)
        self._engine.settle_reading(self._claimed)

    def op(self, transfer_type: TransferType) -> TransferOp:
        """Return the operation for a graph."""
        frames = self._plan.frames[self._start : self._start + len(self._blocks)]
        return TransferOp(
            transfer_type, self._blocks, frames, partial(self._end, frames), partial(self._verify, frames)
        )

    def _end(self, frames: list[memoryview], error: Exception | None) -> Exception | None:
        self._engine.unlock_node(self._node)
        if error is None:
            self._adopt(frames)
        elif isinstance(error, BlockMissing | BlockCorrupt):
            self._drop(error.key, is_lost=not isinstance(error, BlockReplaced))
        else:
            self._give_back(self._claimed)
        self._engine.settle_reading(self._claimed)
        return error

    def _verify(self, frames: list[memoryview]) -> None:
        """Raise BlockCorrupt if a frame does not hold its block, or BlockReplaced if the index has another checksum."""
        sequence_meta, name = self._plan.sequence_meta, self._engine.name
        for at, (block, frame) in enumerate(zip(self._blocks, frames, strict=True), self._start):
            checksum = self._layout.verify(name, frame, block.key, sequence_meta.tokens(at, at + 1))
            if at < self._known and checksum != self._checksums[at * CHECKSUM_BYTES :][:CHECKSUM_BYTES]:
                raise BlockReplaced(name, block.key)

    def _adopt(self, frames: list[memoryview]) -> None:
        """Insert the claimed blocks into the index if they continue a prefix there, else give them back."""
        if not self._claimed:
            return
        engine, first = self._engine, self._start + len(frames) - len(self._claimed)
        match_result = engine.index.match_prefix(self._plan.sequence_meta, update_cache_info=False)
        is_next = (
            match_result.num_matched_blocks == first
            and match_result.unready_node is None
            and not match_result.collides
        )
        if is_next and len(engine.still_read(self._claimed, self._epoch)) == len(self._claimed):
            checksums = self._layout.checksums_of(frames[-len(self._claimed) :])
            engine.insert(
                self._plan.sequence_meta, [block.id for block in self._claimed], match_result, checksums
            )
        else:
            self._give_back(self._claimed)

    def _give_back(self, blocks: list[Block]) -> None:
        self._engine.end_reading(blocks, self._plan.sequence_meta, self._epoch)

    def _drop(self, key: bytes, is_lost: bool) -> None:
        """Remove the block ``key`` and all blocks that follow it from the index.

        ``is_lost``: let the tier drop them, too. A block that another process has replaced stays in the tier.
        """
        engine = self._engine
        engine.recycle_blocks([block for block in self._claimed if block.key == key])
        self._give_back([block for block in self._claimed if block.key != key])
        lost = [at for at, block in enumerate(self._blocks, self._start) if block.key == key]
        if lost and lost[0] < self._known:
            engine.drop(self._plan.sequence_meta, lost[0], partial(self._note_loss, engine), is_lost)
