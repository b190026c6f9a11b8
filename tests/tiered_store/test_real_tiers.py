"""The store over an arena and files on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from anyio import create_task_group

from slime_tiered_store import Layout, Namespace, TieredStore
from slime_tiered_store.tiers.memory import MemoryArena
from slime_tiered_store.tiers.remote import open_remote_tier
from slime_tiered_store.tiers.ssd.tier import SsdTier

pytestmark = pytest.mark.anyio
LAYOUT = Layout(16, 16)
NAMESPACE = Namespace("m", weight_version="1")


def sample(number: int) -> tuple[np.ndarray, bytes]:
    """Return tokens and rows. Every four samples have their first 100 tokens in common."""
    prompt = np.random.default_rng(number // 4).integers(0, 150_000, 100)
    answer = np.random.default_rng(1_000 + number).integers(0, 150_000, 50 + number)
    tokens = np.concatenate((prompt, answer))
    rows = np.repeat(np.cumsum(tokens), 2).astype("<u8").tobytes()
    return tokens, rows


async def test_samples_outlive_memory_and_the_process(tmp_path: Path) -> None:
    """Memory holds a tenth of them, so each is read from disk; then again after a restart."""
    size = LAYOUT.block_bytes
    samples = [sample(number) for number in range(40)]
    for is_restart in (False, True):
        memory = MemoryArena(40, size)
        ssd = await SsdTier.open([tmp_path], 8 << 20, size)
        async with TieredStore(LAYOUT, memory, ssd) as store:
            if not is_restart:
                async with create_task_group() as group:
                    for tokens, rows in samples:
                        group.start_soon(store.put, NAMESPACE, tokens, rows)
            for tokens, rows in samples:
                assert await store.get(NAMESPACE, tokens) == rows
            lower = store.engine.ssd_cache_engine
            assert lower is not None
            shared = 10 * 6 * 3  # whole blocks of the common prompts, three times spared
            assert lower.mempool.num_used_blocks == sum(-(-len(rows) // 256) for _, rows in samples) - shared
        assert lower.recovered == {}
        await ssd.aclose()
        await memory.aclose()


async def test_another_router_reads_what_the_first_stored_remotely(tmp_path: Path) -> None:
    size = LAYOUT.block_bytes
    samples = [sample(number) for number in range(8)]
    first = await open_remote_tier(f"file://{tmp_path}", size)
    async with TieredStore(LAYOUT, MemoryArena(40, size), remote=first) as store:
        for tokens, rows in samples:
            assert (await store.put(NAMESPACE, tokens, rows)).is_stored("remote")
    second = await open_remote_tier(f"file://{tmp_path}", size)
    async with TieredStore(LAYOUT, MemoryArena(40, size), remote=second) as store:
        for tokens, rows in samples:
            assert await store.get(NAMESPACE, tokens) == rows
        longer = np.append(samples[0][0], 7)
        whole_blocks = 150 // 16 * 16
        assert await store.get(NAMESPACE, longer) == samples[0][1][: 16 * whole_blocks]
    for tier in (first, second):
        await tier.aclose()
