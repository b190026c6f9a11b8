"""The index and the pool of one tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from slime_tiered_store.errors import NotEnoughSpaceError
from slime_tiered_store.frames import CHECKSUM_BYTES
from slime_tiered_store.index import MatchResult, RadixNode, RadixTreeIndex
from slime_tiered_store.keys import SequenceMeta
from slime_tiered_store.pool import Mempool
from slime_tiered_store.recovered_blocks import RecoveredBlocks
from slime_tiered_store.tier import Block, BlockKey, MemoryTier, SharedTier, Tier

__all__ = ["CacheEngine"]

#: A placeholder: the checksum of a block in an unready node is known only when the transfer ends.
_UNKNOWN = b"\0" * CHECKSUM_BYTES


class CacheEngine:
    """The blocks of one tier: which are stored, which ids are in use, and which blocks a transfer reads or writes now.

    An id in use belongs to the index, to ``recovered``, or to the caller that got it from ``take`` or ``claim``, until
    that caller inserts or recycles it. ``recovered``: ids, by key, of blocks that an earlier process left and that are
    not in the index. ``reading``: keys of recovered blocks that a transfer reads now. ``epoch``: the number of resets.
    The engine calls ``tier.forget`` for blocks that it drops. ``evicts``: False while the tier may have the only copy
    of a block that must not be lost.

    Counters, in blocks: ``num_hit_blocks``, found here by gets; ``num_promoted_blocks``, read from here into the memory
    tier; ``num_demoted_blocks``, written here from memory.
    """

    def __init__(self, tier: Tier | MemoryTier, tokens_per_block: int, policy: str = "lru") -> None:
        self.name = tier.name
        self.index = RadixTreeIndex(tokens_per_block, policy)
        self.mempool = Mempool(tier.capacity, tier.name)
        self.recovered = RecoveredBlocks(b"", [])
        self.reading: set[BlockKey] = set()
        self.num_evicted_blocks = self.num_hit_blocks = 0
        self.num_promoted_blocks = self.num_demoted_blocks = 0
        self.epoch = 0
        self.evicts = True
        self._slots: Tier | None = None
        #: The number of blocks with each key, in a tier that finds blocks by key. If a block was detached while it was
        #: in use, and was then stored again, its key has two blocks. The tier forgets a key with its last block.
        self._owners: Counter[BlockKey] | None = Counter() if isinstance(tier, SharedTier) else None
        self._on_settled: dict[RadixNode | BlockKey, list[Callable[[], None]]] = {}
        if not isinstance(tier, MemoryTier):
            self._slots = tier
            self.recovered = RecoveredBlocks.of(tier.recovered())
            self.mempool.claim_blocks(self.recovered.ids())

    def take(
        self, num_required_blocks: int, protected_node: RadixNode,
        on_evict: Callable[[RadixNode, int], None] | None = None,
    ) -> list[int]:  # fmt: skip
        """Allocate ids. If too few are free, evict blocks, but not those of ``protected_node`` and of its ancestors.

        Raises ``NotEnoughSpaceError`` when too few blocks are free or can be evicted. Then nothing is evicted.
        """
        missing = num_required_blocks - self.mempool.num_free_blocks
        if missing > 0:
            self.index.lock(protected_node)
            try:
                self._evict(missing, num_required_blocks, on_evict)
            finally:
                self.unlock_node(protected_node)
        return self.mempool.allocate_blocks(num_required_blocks)

    def _evict(self, missing: int, required: int, on_evict: Callable[[RadixNode, int], None] | None) -> None:
        """Evict ``missing`` blocks. Recovered blocks go first."""
        evictable = len(self.recovered) + self.index.num_evictable_blocks if self.evicts else 0
        if missing > evictable:
            raise NotEnoughSpaceError(self.name, required, self.mempool.num_free_blocks + evictable)
        unread = self.claim(list(islice(self.recovered, missing)))
        evicted = unread + self.index.evict(missing - len(unread), on_evict)
        self.num_evicted_blocks += len(evicted)
        self.recycle_blocks(evicted)

    def is_crowded(self, sequence_meta: SequenceMeta) -> bool:
        """Return True if the blocks of ``sequence_meta`` have no room now, but will have room once transfers end."""
        match_result = self.index.match_prefix(sequence_meta, update_cache_info=False)
        missing = sequence_meta.num_blocks - match_result.num_matched_blocks
        on_path = sum(node.size() for node, _ in match_result.path)
        can_fit = self.evicts and missing <= self.mempool.num_total_blocks - on_path
        if match_result.unready_node is not None or not can_fit:
            return False
        self.index.lock(match_result.last_node)
        evictable = self.index.num_evictable_blocks
        self.unlock_node(match_result.last_node)
        return missing > self.mempool.num_free_blocks + len(self.recovered) + evictable

    def claim(self, keys: Iterable[BlockKey]) -> list[Block]:
        """Remove the blocks of ``keys`` from ``recovered``. Return those that were there: they belong to the caller."""
        taken = [(self.recovered.take(key), key) for key in keys]
        return [Block(block_id, key) for block_id, key in taken if block_id is not None]

    def recycle_blocks(self, blocks: list[Block], forget: bool = True) -> None:
        """Return the ids of ``blocks`` to the pool. If ``forget`` is True, the tier forgets the blocks."""
        if blocks:
            self.mempool.recycle_blocks(block.id for block in blocks)
            unowned = self._disowned(blocks)
            if self._slots is not None and forget:
                self._slots.forget(unowned)

    def _disowned(self, blocks: list[Block]) -> list[Block]:
        """Return those of ``blocks`` that the tier may forget, since no other block has their slot or key."""
        if self._owners is None:
            return blocks
        self._owners.subtract(block.key for block in blocks)
        unowned = [block for block in blocks if self._owners[block.key] <= 0]
        for block in unowned:
            del self._owners[block.key]
        return unowned

    def insert(
        self,
        sequence_meta: SequenceMeta,
        physical_block_ids: list[int],
        match_result: MatchResult,
        checksums: bytes | None = None,
    ) -> RadixNode:
        """Add to the index the blocks that follow those of ``match_result``. On an error, the ids are recycled.

        If ``checksums`` are given, the blocks are ready at once.
        """
        known = _UNKNOWN * len(physical_block_ids) if checksums is None else checksums
        try:
            node = self.index.insert(
                sequence_meta, physical_block_ids, match_result, known, is_ready=checksums is not None
            )
        except BaseException:
            self.mempool.recycle_blocks(physical_block_ids)
            raise
        if self._owners is not None:
            self._owners.update(block.key for block in node.blocks())
        return node

    def unlock_node(self, node: RadixNode) -> None:
        """Release one lock."""
        self.recycle_blocks(self.index.unlock(node))

    def set_ready(self, node: RadixNode, checksums: bytes) -> bool:
        """Mark an unready node as complete. Return False when it has been detached meanwhile."""
        node.checksums[:] = checksums
        is_kept = not node.is_detached
        self.recycle_blocks(self.index.set_ready(node))
        self._settle(node)
        return is_kept

    def discard(self, node: RadixNode) -> None:
        """Remove an unready node whose transfer failed."""
        self.recycle_blocks(self.index.discard(node))
        self._settle(node)

    def begin_reading(self, keys: Iterable[BlockKey]) -> list[Block]:
        """Claim recovered blocks of ``keys`` for a read. Other plans that need them can wait, see ``on_settled``."""
        blocks = self.claim(keys)
        self.reading.update(block.key for block in blocks)
        return blocks

    def end_reading(self, blocks: list[Block], sequence_meta: SequenceMeta, epoch: int) -> None:
        """Put blocks of ``begin_reading`` back into ``recovered``, at the end, so that other blocks are evicted first.

        Blocks that were forgotten meanwhile, or that the index knows by now, are recycled instead.
        """
        known = self.index.match_prefix(sequence_meta, update_cache_info=False).num_matched_blocks
        kept = self.still_read(blocks, epoch).difference(sequence_meta.keys(0, known))
        self.recycle_blocks([block for block in blocks if block.key not in kept])
        self.recovered.put_back((block.key, block.id) for block in blocks if block.key in kept)

    def still_read(self, blocks: list[Block], epoch: int) -> set[BlockKey]:
        """Return the keys of those ``blocks`` of ``begin_reading`` that were neither forgotten nor reset since then.

        ``epoch``: the epoch in which the blocks were claimed.
        """
        return self.reading.intersection(block.key for block in blocks) if epoch == self.epoch else set()

    def settle_reading(self, blocks: list[Block]) -> None:
        """End the reading of ``blocks``, and call the callbacks that wait for them.

        Call this after the blocks were inserted into the index, put back, or recycled.
        """
        for block in blocks:
            self.reading.discard(block.key)
            self._settle(block.key)

    def drop(
        self,
        sequence_meta: SequenceMeta,
        block: int,
        on_evict: Callable[[RadixNode, int], None],
        forget: bool = True,
    ) -> None:
        """Remove from the index a block that the tier cannot read, and all blocks that follow it.

        ``forget``: the tier forgets the blocks, too; else only the index does.
        """
        first = 0
        for node, taken in self.index.match_prefix(sequence_meta, update_cache_info=False).path:
            if first <= block < first + taken and node.is_ready:
                on_evict(node, block - first)
                for below in self.index.below(node):
                    on_evict(below, 0)
                self.recycle_blocks(self.index.detach(node, block - first), forget)
                return
            first += taken

    def forget(self, sequence_meta: SequenceMeta) -> None:
        """Forget the blocks of a sequence, and all blocks that follow them in the index.

        Recovered blocks that follow them are not forgotten. Blocks on their way are forgotten when they arrive.
        """
        unready = self.index.match_prefix(sequence_meta, update_cache_info=False).unready_node
        if unready is not None:  # without the callback its blocks would never be forgotten
            self.on_settled(unready, partial(self.forget, sequence_meta))
        self.drop(sequence_meta, 0, lambda node, start: None)
        keys = sequence_meta.keys(0, sequence_meta.num_blocks)
        self.recycle_blocks(self.claim(keys))
        self.reading.difference_update(keys)

    def on_settled(self, subject: RadixNode | BlockKey, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when ``subject`` settles.

        A node settles when it is ready or discarded, a key when :meth:`settle_reading` is called for its block.
        """
        self._on_settled.setdefault(subject, []).append(callback)

    def _settle(self, subject: RadixNode | BlockKey) -> None:
        for callback in self._on_settled.pop(subject, []):
            callback()

    def reset(self) -> None:
        """Forget all known blocks. Blocks in use are recycled when their last user ends."""
        self.epoch += 1
        self.recycle_blocks(self.claim(list(self.recovered)) + self.index.reset())
