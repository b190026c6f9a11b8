"""The index and the pool of one tier."""

from __future__ import annotations

import gc
import tracemalloc
from time import process_time

from slime_tiered_store.engine import CacheEngine, GlobalCacheEngine
from slime_tiered_store.frames import Layout
from slime_tiered_store.index import RadixNode
from slime_tiered_store.keys import Namespace, SequenceMeta
from tiered_store.plain_tiers import PlainMemory, PlainShared, PlainTier

SEQUENCE = SequenceMeta(Namespace("model").root_key(2, 8), [1, 2, 3], 2)


def stored(engine: CacheEngine) -> RadixNode:
    """An unready node with the blocks of the sequence."""
    match = engine.index.match_prefix(SEQUENCE)
    return engine.insert(SEQUENCE, engine.take(SEQUENCE.num_blocks, match.last_node), match)


def test_a_write_that_ends_after_a_reset_deletes_no_new_block_of_its_key() -> None:
    """A shared tier finds blocks by key, so the id alone does not tell old and new apart."""
    tier = PlainShared(64, 8)
    engine = CacheEngine(tier, 2)
    old = stored(engine)
    engine.reset()
    new = stored(engine)
    tier.write_now(new.blocks(), [memoryview(b"new")] * len(new.blocks()))
    assert engine.set_ready(new, bytes(16))
    engine.discard(old)
    assert len(tier.slots) == SEQUENCE.num_blocks
    assert engine.mempool.num_used_blocks == SEQUENCE.num_blocks
    engine.reset()
    assert tier.slots == {}
    assert engine.mempool.num_used_blocks == 0


def test_loss_of_one_block_of_a_long_sequence_copies_no_other_key() -> None:
    """Counted in bytes that are allocated. The keys of the sequence have 160,000."""
    layout, capacity = Layout(2, 1), 10_000
    tiers = (PlainMemory(layout.block_bytes, capacity), PlainTier(layout.block_bytes, capacity))
    engine = GlobalCacheEngine(layout, *tiers)
    whole = SequenceMeta(Namespace("model").root_key(2, 1), range(2 * capacity), 2)
    for each in engine.cache_engines:
        match = each.index.match_prefix(whole)
        each.insert(whole, each.take(capacity, match.last_node), match, bytes(8 * capacity))
    memory, ssd = engine.cache_engines
    ssd.recycle_blocks(ssd.index.evict(5))
    tracemalloc.start()
    engine.put(SequenceMeta(Namespace("model").root_key(2, 1), [7, 7], 2), memoryview(b"rows")[:2])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 80_000
    assert engine.losses == [whole.key(capacity - 1)]
    assert memory.mempool.num_used_blocks == capacity


def test_eviction_of_recovered_blocks_does_not_pass_those_that_went_before() -> None:
    tier = PlainTier(64, 50_000)
    tier.left = {number.to_bytes(16): number for number in range(tier.capacity)}
    engine = CacheEngine(tier, 2)

    def evict_some() -> float:
        gc.disable()  # a full collection takes far longer
        try:
            began = process_time()
            for _ in range(100):
                engine.take(1, engine.index.root)
            return process_time() - began
        finally:
            gc.enable()

    first = evict_some()
    engine.take(49_000, engine.index.root)
    assert evict_some() < 5 * first + 0.001  # with a dict 20 times as long
    assert len(engine.recovered) == 800
