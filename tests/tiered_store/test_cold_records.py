"""Records of any length, kept in memory or on disk until they are forgotten."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from deadlines import HANG_S, until
from router_core.errors import StartupError
from slime_tiered_store.cold_records import LAYOUT, ColdRecords
from slime_tiered_store.errors import NotEnoughSpaceError, RecordLost, StoreError, TierFailed
from slime_tiered_store.store import TieredStore
from slime_tiered_store.tiers.memory import MemoryArena
from slime_tiered_store.tiers.remote import open_remote_tier
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import HungDisk

pytestmark = pytest.mark.anyio

ROW = LAYOUT.bytes_per_token


@asynccontextmanager
async def records(
    memory: int, ssd: int = 0, path: Path | None = None, ops: FileOps | None = None, *, stops: bool = False
) -> AsyncIterator[ColdRecords]:
    """Records in tiers of so many blocks. A disk with ``ops`` has a second for an answer."""
    arena = MemoryArena(memory, LAYOUT.block_bytes)
    disk = (
        await SsdTier.open(
            [path], ssd * 4096 + (1 << 16), LAYOUT.block_bytes, ops, wait_s=1.0 if ops else HANG_S
        )
        if path is not None
        else None
    )
    kept = ColdRecords(wait_s=1.0, stops_on_loss=stops)
    try:
        async with TieredStore(LAYOUT, arena, disk) as store:
            with kept.kept_in(store, [arena, disk] if disk is not None else [arena]):
                yield kept
    finally:
        if disk is not None:
            await disk.aclose()
        await arena.aclose()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def test_records_that_no_tier_has_are_told_without_a_read(tmp_path: Path) -> None:
    async with records(2, 64, tmp_path) as kept:
        await kept.keep([(key(number), bytes(3 * ROW)) for number in range(2)])
        assert [await kept.holds(key(number)) for number in range(3)] == [True, True, False]
        kept.forget([key(0)])
        assert not await kept.holds(key(0))
    with pytest.raises(StoreError):
        await kept.holds(key(1))
    async with records(2, 64, tmp_path) as kept:
        await kept.adopt({key(1): 3 * ROW})
        assert await kept.holds(key(1))
        for engine, _ in kept.tiers:
            engine.reset()
        assert not await kept.holds(key(1))
        assert kept.losses.count == 0  # only a read is sure


@pytest.mark.usefixtures("no_collections")
async def test_frames_of_a_read_are_free_when_it_ends(tmp_path: Path) -> None:
    """Memory is full, so the frames are buffers of their own. The garbage collector does not run."""
    async with records(1, 2048, tmp_path) as kept:
        await kept.keep([(key(number), bytes(1 << 20)) for number in range(4)])
        into = bytearray(1 << 20)
        tracemalloc.start()
        for number in range(12):
            assert await kept.read(key(number % 4), memoryview(into))
        now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert now < 6 << 20  # each of four threads of the SSD keeps a buffer of 1.1 MiB


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_records_of_all_lengths_come_back_from_the_disk(tmp_path: Path) -> None:
    contents = [bytes(range(256)) * 40, b"", b"x", b"y" * (ROW - 8), b"y" * (ROW - 7), b"z" * (3 * ROW)]
    async with records(2, 64, tmp_path) as kept:
        await kept.keep([(key(number), content) for number, content in enumerate(contents)])
        for number, content in enumerate(contents):
            assert await kept.fetch([key(number)]) == [content]
        numbers = [5, 0, 5, 99]
        assert await kept.fetch([key(one) for one in numbers]) == [
            contents[5],
            contents[0],
            contents[5],
            None,
        ]
        await kept.keep([(key(0), contents[0])])  # again, as after a failure
        assert len(kept) == len(contents)


async def test_records_of_an_earlier_run_are_adopted(tmp_path: Path) -> None:
    contents = {key(number): bytes([number]) * 3000 * number for number in range(4)}
    async with records(64, 64, tmp_path) as kept:
        await kept.keep(list(contents.items()))
        used = kept.num_blocks
    async with records(64, 64, tmp_path) as kept:
        sizes = {one: len(content) for one, content in contents.items() if one != key(2)}
        assert await kept.adopt(sizes | {key(9): 5}) == [key(9)]
        engine = kept.tiers[-1][0]
        assert kept.num_blocks == engine.mempool.num_used_blocks == used - 2
        assert await kept.fetch([key(0), key(1), key(2), key(3)]) == [
            contents[key(0)],
            contents[key(1)],
            None,
            contents[key(3)],
        ]
        kept.forget(list(sizes))
        assert engine.mempool.num_used_blocks == 0
    async with records(64, 64, tmp_path) as kept:
        assert await kept.adopt(sizes) == list(sizes)


async def test_start_counts_lost_records_or_ends_and_drops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with records(64, 64, tmp_path) as kept:
        await kept.keep([(key(1), bytes(3 * ROW)), (key(2), b"not needed")])
    sizes = {key(1): 3 * ROW, key(8): 5, key(9): 5}
    for _ in range(2):
        async with records(64, 64, tmp_path, stops=True) as kept:
            with pytest.raises(StartupError, match=r"2 of 3 records of earlier runs are lost.*-on-loss mark"):
                await kept.adopt(sizes)
            assert kept.tiers[-1][0].mempool.num_used_blocks == 5
    async with records(64, 64, tmp_path) as kept:
        assert await kept.adopt(sizes) == [key(8), key(9)]
        assert kept.losses.count == 2
        assert await kept.fetch([key(8)]) == [None]  # it is known to be lost
        assert kept.losses.count == 2
        kept.tiers[-1][0].reset()
        kept.tiers[0][0].reset()
        assert await kept.fetch([key(1)]) == [None]
        assert kept.losses.count == 3
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "2 of 3 records of earlier runs are lost" in errors[0]
    assert f"the record {key(1).hex()} was kept" in errors[1]


async def test_damaged_record_is_lost_if_it_was_kept() -> None:
    async with records(64) as kept:
        await kept.keep([(key(1), b"damaged")])
        kept.damaged(key(2))
        assert kept.losses.count == 0
        kept.damaged(key(1))
        assert kept.losses.count == 1
        with pytest.raises(
            RecordLost, match=f"the record {key(1).hex()} was kept, and is damaged; .*--store-on-loss mark"
        ):
            await kept.losses.stop()


async def test_equal_records_under_two_keys_are_two_records() -> None:
    async with records(64) as kept:
        await kept.keep([(key(1), b"same"), (key(2), b"same")])
        kept.forget([key(1), key(9)])
        assert await kept.fetch([key(1), key(2)]) == [None, b"same"]


async def test_record_waits_for_room_and_evicts_none(tmp_path: Path) -> None:
    async with records(1, 32, tmp_path) as kept:
        room = kept._capacity
        await kept.keep([(key(number), b"a" * number) for number in range(room)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.keep, [(key(1000), b"late")])
            await until(lambda: kept.waits == 1)
            with anyio.move_on_after(0.05):
                await kept.keep([(key(1001), b"given up")])
            assert len(kept) == room
            kept.forget([key(3)])
        found = await kept.fetch([key(number) for number in range(room)])
        assert found == [b"a" * number if number != 3 else None for number in range(room)]
        assert await kept.fetch([key(1000), key(1001)]) == [b"late", None]


async def test_record_that_never_fits_is_refused_at_once() -> None:
    async with records(32) as kept:
        with pytest.raises(NotEnoughSpaceError):
            await kept.keep([(key(1), bytes(64 * ROW))])
        assert (len(kept), kept.num_blocks) == (0, 0)


async def test_forgotten_records_give_their_blocks_back(tmp_path: Path) -> None:
    async with records(4, 32, tmp_path) as kept:
        for number in range(40):
            await kept.keep([(key(number), bytes(2 * ROW))])
            assert await kept.fetch([key(number)]) == [bytes(2 * ROW)]
            kept.forget([key(number)])
        assert kept.num_blocks == 0
        assert [engine.mempool.num_used_blocks for engine, _ in kept.tiers] == [0, 0]
        assert [engine.num_evicted_blocks for engine, _ in kept.tiers] == [0, 0]


async def test_record_that_is_given_up_on_its_way_takes_no_room(tmp_path: Path) -> None:
    async with records(4, 32, tmp_path) as kept:
        await kept.keep([(key(0), b"kept")])
        engines = [engine for engine, _ in kept.tiers]
        for number in range(1, 40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kept.keep, [(key(number), b"given up")])
                while engines[-1].mempool.num_used_blocks == 1:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            kept.forget([key(number)])  # it may have been kept just before
            await until(lambda: [engine.mempool.num_used_blocks for engine in engines] == [1, 1])
        assert await kept.fetch([key(0)]) == [b"kept"]
        assert [engine.num_evicted_blocks for engine in engines] == [0, 0]


async def test_closed_store_says_so() -> None:
    kept = ColdRecords(wait_s=1.0, stops_on_loss=False)
    kept._capacity = 8
    with pytest.raises(StoreError, match="closed"):
        await kept.keep([(key(1), b"x")])
    with pytest.raises(StoreError, match="closed"):
        await kept.fetch([key(1)])
    assert len(kept) == 0


async def test_beginning_of_a_record_is_read_in_place(tmp_path: Path) -> None:
    content = bytes(range(251)) * 60
    async with records(2, 64, tmp_path) as kept:
        await kept.keep([(key(1), content)])
        for length in (0, 1, ROW - 8, ROW - 7, 2 * ROW, len(content)):
            into = bytearray(length)
            assert await kept.read(key(1), memoryview(into))
            assert into == content[:length]
        assert not await kept.read(key(1), memoryview(bytearray(len(content) + 1)))
        assert not await kept.read(key(1), memoryview(bytearray(9 * ROW)))
        assert not await kept.read(key(2), memoryview(bytearray(1)))


async def test_disk_that_does_not_answer_fails_each_read_and_holds_nothing(tmp_path: Path) -> None:
    disk = HungDisk()
    async with records(4, 64, tmp_path, disk.ops) as kept:
        for number in range(8):
            await kept.keep([(key(number), bytes([number]) * 2 * ROW)])
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                for number in (0, 0, 1, 2, 3):
                    tasks.start_soon(refused, kept, number)
        memory = kept.tiers[0][0]
        assert memory.index.num_blocks == memory.index.num_evictable_blocks == memory.mempool.num_used_blocks
        disk.go.set()
        await until(lambda: not disk.waiting)
        for number in range(8):
            assert await kept.fetch([key(number)]) == [bytes([number]) * 2 * ROW]


async def refused(kept: ColdRecords, number: int) -> None:
    with pytest.raises(TierFailed, match=r"no answer within 1 s"):
        await kept.fetch([key(number)])


async def test_full_remote_tier_lets_records_wait_and_forgets_none(tmp_path: Path) -> None:
    arena = MemoryArena(2, LAYOUT.block_bytes)
    remote = await open_remote_tier(tmp_path.as_uri(), LAYOUT.block_bytes, capacity=16)
    kept = ColdRecords(wait_s=1.0, stops_on_loss=False)
    async with TieredStore(LAYOUT, arena, remote=remote) as store:
        with kept.kept_in(store, [arena, remote]):
            for number in range(15):
                await kept.keep([(key(number), bytes([number]))])
            with anyio.move_on_after(0.05) as scope:
                await kept.keep([(key(15), b"x")])
            assert scope.cancelled_caught
            assert kept.waits == 1
            assert await kept.fetch([key(number) for number in range(15)]) == [bytes([n]) for n in range(15)]
            kept.forget([key(3)])
            await kept.keep([(key(15), b"x")])
            assert await kept.fetch([key(15), key(3)]) == [b"x", None]
    await remote.aclose()
    await arena.aclose()
    assert len([path for path in tmp_path.glob("*/*") if path.is_file()]) == 15  # noqa: ASYNC240  # nobody waits
