"""Many puts and gets, after which nothing is left but what the tiers hold."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter

import pytest

from slime_tiered_store.engine import GlobalCacheEngine, Plan
from slime_tiered_store.errors import StoreError, TierFailed
from slime_tiered_store.frames import Layout
from slime_tiered_store.index import RadixNode
from slime_tiered_store.keys import Namespace, SequenceMeta
from slime_tiered_store.transfers import TransferOp, TransferScheduler, TransferType
from tiered_store.plain_tiers import PlainMemory, PlainTier

LAYOUT = Layout(4, 2)
ROOT = Namespace("m").root_key(4, 2)
BLOCKS = 24
TASKS = int(os.environ.get("SLIME_ROUTER_STORE_TASKS", "10000"))


def end(scheduler: TransferScheduler, tier: PlainTier, op: TransferOp, fails: bool) -> None:
    error: Exception | None = TierFailed(tier.name, "move", "/disk", "EIO") if fails else None
    try:
        if not fails and op.transfer_type is TransferType.DISK2H:
            tier.read_now(op.blocks, op.buffers)
        elif not fails and op.transfer_type is TransferType.H2DISK:
            tier.write_now(op.blocks, op.buffers)
        if not fails and op.work is not None:
            op.work()
    except StoreError as failure:
        error = failure
    scheduler.finish(op, error)


def test_many_tasks_leave_nothing_behind(request: pytest.FixtureRequest) -> None:
    """Three in four transfers work. Up to four wait at a time, and end in any order.

    ``SLIME_ROUTER_STORE_TASKS`` is the number of tasks.
    """
    memory, ssd = PlainMemory(LAYOUT.block_bytes, BLOCKS), PlainTier(LAYOUT.block_bytes, BLOCKS)
    engine, scheduler = GlobalCacheEngine(LAYOUT, memory, ssd), TransferScheduler()
    chance, running, ends = random.Random(1), list[TransferOp](), Counter[str]()
    gc.collect()
    gc.disable()  # a server's collector hardly ever frees reference cycles, so there must be none
    request.addfinalizer(gc.enable)
    before = _count()
    for task in range(TASKS):
        prompt = chance.randrange(20)
        tokens = [prompt] * 4 + [chance.randrange(3)] * chance.randrange(9)
        sequence = SequenceMeta(ROOT, tokens, 4)
        rows = memoryview(bytes(2 * len(tokens)))
        plan = engine.put(sequence, rows) if task % 2 else engine.get(sequence)
        if isinstance(plan, Plan):
            plan.graph.on_complete = lambda: ends.update(["end"])
            plan.graph.on_abort = lambda error: ends.update(["end"])
            scheduler.submit(plan.graph)
            ends["plans"] += 1
            plan.release()
        else:
            plan.subscribe(lambda: ends.update(["settled"]))
            ends["waits"] += 1
        running += scheduler.next_ops()
        while len(running) > 4:
            end(scheduler, ssd, running.pop(chance.randrange(len(running))), chance.random() < 0.25)
            running += scheduler.next_ops()
        engine.losses.clear()
    del plan
    while running:
        end(scheduler, ssd, running.pop(), False)
        running += scheduler.next_ops()
    assert ends["end"] == ends["plans"] > TASKS / 2
    assert ends["settled"] == ends["waits"] > 0
    assert not scheduler.graphs
    engine.reset()
    for each in engine.cache_engines:
        assert each.mempool.num_used_blocks == each.index.num_blocks == 0
    assert ssd.slots == {}
    assert _count() | {"RadixNode": before["RadixNode"]} == before
    gc.collect()  # the trees of the reset
    assert _count() == before


def _count() -> dict[str, int]:
    """Return the number of living objects of the store, by type."""
    kinds = (RadixNode, TransferOp, Plan, SequenceMeta)
    found = Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds))
    return {kind.__name__: found[kind.__name__] for kind in kinds if kind is not SequenceMeta}
