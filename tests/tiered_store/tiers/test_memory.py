"""The memory tier: views of one arena."""

from __future__ import annotations

import pytest

from slime_tiered_store.errors import NotEnoughSpaceError
from slime_tiered_store.tier import MemoryTier
from slime_tiered_store.tiers.memory import MemoryArena

pytestmark = pytest.mark.anyio


async def test_each_block_has_its_own_bytes() -> None:
    arena: MemoryTier = MemoryArena(capacity=5, block_bytes=1000)
    for block_id in range(5):
        arena.stretches([block_id])[0][:] = bytes([block_id + 1]) * 1000
    for block_ids in ([4, 0, 2, 2], [0, 1, 2, 3, 4], [3, 4, 0, 1], [1, 0], [2]):
        expected = b"".join(bytes([number + 1]) * 1000 for number in block_ids)
        assert b"".join(arena.stretches(block_ids)) == expected
    assert [len(view) for view in arena.stretches([3, 4, 0, 1, 2])] == [2000, 3000]
    assert arena.stretches([]) == []
    for block_id in (-1, 5):
        with pytest.raises(IndexError, match=f"tier memory has the blocks 0 to 4, not {block_id}"):
            arena.stretches([0, block_id, 4])
    await arena.aclose()


async def test_a_view_that_is_left_does_not_hinder_the_end() -> None:
    arena = MemoryArena(2, 4096)
    (view,) = arena.stretches([1])
    await arena.aclose()
    view[:3] = b"abc"
    assert bytes(view[:3]) == b"abc"
    with pytest.raises(ValueError, match="released"):
        arena.stretches([0])


async def test_more_memory_than_addresses_is_refused() -> None:
    for capacity in (1 << 40, 1 << 60):
        with pytest.raises(NotEnoughSpaceError) as error:
            MemoryArena(capacity, 1 << 20)
        assert (error.value.required, error.value.available) == (capacity, 0)
