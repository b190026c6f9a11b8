"""Gets and puts over all tiers, and the faults of the design that this store follows."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import CancelScope, Event, create_task_group, wait_all_tasks_blocked
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from slime_tiered_store import off_loop
from slime_tiered_store.engine import Plan
from slime_tiered_store.errors import (
    BlockReplaced,
    NotEnoughSpaceError,
    NotStored,
    RowsDiffer,
    StaleMatch,
    TierFailed,
    TierFull,
)
from slime_tiered_store.frames import Layout
from slime_tiered_store.keys import Namespace
from slime_tiered_store.store import PutResult, TieredStore
from slime_tiered_store.tier import Block, BlockKey
from tiered_store.plain_tiers import PlainMemory, PlainShared, PlainTier

pytestmark = pytest.mark.anyio
LAYOUT = Layout(4, 3)
NAMESPACE = Namespace("m", weight_version="1")


def rows(tokens: range | list[int]) -> bytes:
    return b"".join(bytes([token % 251, token // 251 % 251, 7]) for token in tokens)


class Place:
    """A store with its tiers. ``lost``: keys that went from the last tier."""

    def __init__(
        self, memory: int = 16, ssd: int | None = 16, remote: int | None = None, wait_s: float = 30
    ) -> None:
        self.memory = PlainMemory(LAYOUT.block_bytes, memory)
        self.ssd = PlainTier(LAYOUT.block_bytes, ssd or 0)
        self.remote = PlainShared(LAYOUT.block_bytes, remote or 0)
        self.lost: list[BlockKey] = []
        self.store = TieredStore(
            LAYOUT,
            self.memory,
            self.ssd if ssd is not None else None,
            self.remote if remote is not None else None,
            wait_s=wait_s,
            on_loss=self.lost.extend,
        )

    async def put(self, tokens: range) -> PutResult:
        return await self.store.put(NAMESPACE, tokens, rows(tokens))

    async def get(self, tokens: range) -> bytes:
        return await self.store.get(NAMESPACE, tokens)

    def clear_memory(self) -> None:
        """Forget what memory holds, as many other puts would."""
        self.store.engine.cpu_cache_engine.reset()

    def restart(self, memory: int | None = None) -> Place:
        """Return a new process with the same lower tiers."""
        ssd = self.store.engine.ssd_cache_engine is not None
        remote = self.store.engine.remote_cache_engine is not None
        place = Place(
            self.memory.capacity if memory is None else memory, 0 if ssd else None, 0 if remote else None
        )
        self.ssd.left = {key: slot for slot, (key, _) in self.ssd.slots.items()}
        place.ssd, place.remote = self.ssd, self.remote
        place.store = TieredStore(
            LAYOUT, place.memory, self.ssd if ssd else None, self.remote if remote else None,
            on_loss=place.lost.extend,
        )  # fmt: skip
        return place

    def check_quiet(self) -> None:
        """Nothing is locked, unready or in staging, and each ready block has its bytes."""
        for engine in self.store.engine.cache_engines:
            used = [block for node in engine.index.nodes() for block in node.blocks()]
            ids = [block.id for block in used] + list(engine.recovered.values())
            assert len(ids) == len(set(ids)) == engine.mempool.num_used_blocks
            assert engine.index.num_blocks == engine.index.num_evictable_blocks == len(used)
            assert all(node.is_ready and not node.lock_cnt for node in engine.index.nodes())
            for block in used:
                frame = self._frame(engine.name, block.id, block.key)
                LAYOUT.verify(engine.name, frame, block.key, _tokens(frame))

    def _frame(self, tier: str, slot: int, key: BlockKey) -> memoryview:
        if tier == "memory":
            return self.memory.stretches([slot])[0]
        kept = self.ssd.slots[slot] if tier == "ssd" else self.remote.slots[int.from_bytes(key)]
        assert kept[0] == key
        return memoryview(kept[1])


def _tokens(frame: memoryview) -> bytes:
    count = int.from_bytes(frame[24:28], "little")
    return bytes(frame[32 : 32 + 4 * count])


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Place]:
    async with place.store:
        yield place
    place.check_quiet()


@pytest.fixture(params=[4, 0], ids=["", "no-memory"])
def memory(request: pytest.FixtureRequest) -> int:
    return int(request.param)


async def test_rows_come_back_from_each_tier() -> None:
    async with opened(Place(remote=16)) as place:
        result = await place.put(range(10))
        assert [result.is_stored(tier) for tier in ("memory", "ssd", "remote")] == [True, True, True]
        assert not result.is_stored("tape")
        assert await place.get(range(10)) == rows(range(10))
        place.clear_memory()
        assert await place.get(range(10)) == rows(range(10))
        assert (place.ssd.reads, place.remote.reads) == (3, 0)
        assert await place.get(range(10)) == rows(range(10))
        assert place.ssd.reads == 3


def counted(place: Place) -> dict[str, tuple[int, int, int]]:
    """Hits, promotions and demotions of each tier, in blocks."""
    return {
        each.name: (each.num_hit_blocks, each.num_promoted_blocks, each.num_demoted_blocks)
        for each in place.store.engine.cache_engines
    }


async def test_hits_promotions_and_demotions_are_counted_by_tier() -> None:
    async with opened(Place(remote=16)) as place:
        place.ssd.failures = [TierFailed("ssd", "write", "/disk", "EIO")]
        await place.put(range(12))
        assert counted(place) == {"memory": (0, 0, 0), "ssd": (0, 0, 0), "remote": (0, 0, 3)}
        await place.put(range(12))
        await place.get(range(8))
        assert counted(place) == {"memory": (2, 0, 0), "ssd": (0, 0, 3), "remote": (0, 0, 3)}
        place.clear_memory()
        await place.get(range(8))
        place.ssd.failures = [TierFailed("ssd", "read", "/disk", "EIO")]
        await place.get(range(12))  # two blocks in memory, and one that only the remote tier can give
        assert counted(place) == {"memory": (4, 0, 0), "ssd": (2, 2, 3), "remote": (1, 1, 3)}


async def test_blocks_that_memory_has_no_room_for_are_hits_but_no_promotions() -> None:
    async with opened(Place(memory=1)) as place:
        await place.put(range(8))
        await place.get(range(8))
        assert counted(place) == {"memory": (0, 0, 0), "ssd": (2, 0, 2)}


async def test_a_longer_sequence_finds_whole_blocks_of_a_shorter_one() -> None:
    async with opened(Place()) as place:
        await place.put(range(10))
        assert await place.get(range(20)) == rows(range(8))
        assert await place.get(range(1, 9)) == b""
        assert await place.get(range(0)) == b""
        assert await place.put(range(0)) == PutResult({"memory": None, "ssd": None})


async def test_borrowed_rows_stay_until_they_are_given_back() -> None:
    async with opened(Place(memory=3)) as place:
        await place.put(range(10))
        async with place.store.borrow(NAMESPACE, range(10)) as borrowed:
            result = await place.put(range(100, 112))
            assert not result.is_stored("memory")
            assert result.is_stored("ssd")
            assert borrowed.num_tokens == 10
            assert b"".join(borrowed.pieces) == rows(range(10))
        assert await place.get(range(100, 112)) == rows(range(100, 112))


async def test_each_tier_is_read_for_what_the_faster_ones_lack() -> None:
    async with opened(Place(remote=16)) as place:
        await place.put(range(16))
        place.clear_memory()
        ssd = place.store.engine.ssd_cache_engine
        assert ssd is not None
        ssd.recycle_blocks(ssd.index.evict(1))
        await place.get(range(4))
        place.ssd.reads = 0
        assert await place.get(range(16)) == rows(range(16))
        assert (place.ssd.reads, place.remote.reads) == (2, 1)


async def test_a_read_from_remote_fills_memory_and_ssd() -> None:
    async with opened(Place(remote=16)) as place:
        await place.put(range(8))
        place.clear_memory()
        assert place.store.engine.ssd_cache_engine is not None
        place.store.engine.ssd_cache_engine.reset()
        assert await place.get(range(8)) == rows(range(8))
        assert (place.remote.reads, place.ssd.reads) == (2, 0)
        await wait_all_tasks_blocked()
        place.clear_memory()
        assert await place.get(range(8)) == rows(range(8))
        assert (place.remote.reads, place.ssd.reads) == (2, 2)


async def test_a_hit_in_memory_still_fills_lower_tiers() -> None:
    async with opened(Place()) as place:
        place.ssd.failures = [TierFailed("ssd", "write", "/disk", "EIO")]
        result = await place.put(range(8))
        assert isinstance(result.outcomes["ssd"], TierFailed)
        assert (await place.put(range(8))).is_stored("ssd")
        place.clear_memory()
        assert await place.get(range(8)) == rows(range(8))


async def test_a_get_fills_lower_tiers_too() -> None:
    async with opened(Place()) as place:
        place.ssd.failures = [TierFailed("ssd", "write", "/disk", "EIO")]
        await place.put(range(8))
        assert await place.get(range(8)) == rows(range(8))
        await wait_all_tasks_blocked()
        assert place.ssd.writes == 2


async def test_the_tier_that_is_short_is_left_out_and_not_the_put() -> None:
    async with opened(Place(memory=16, ssd=1, remote=16)) as place:
        result = await place.put(range(8))
        assert isinstance(result.outcomes["ssd"], NotEnoughSpaceError)
        assert result.is_stored("memory")
        assert result.is_stored("remote")


async def test_a_put_that_no_tier_takes_is_an_error() -> None:
    async with opened(Place(memory=1, ssd=8)) as place:
        place.ssd.failures = [TierFull("ssd", 2, 0)]
        with pytest.raises(
            NotStored, match="tier memory: 2 blocks are required, 1 are available; tier ssd: 2"
        ):
            await place.put(range(8))


async def test_other_rows_for_equal_tokens_are_refused(memory: int) -> None:
    async with opened(Place(memory)) as place:
        await place.put(range(8))
        other = rows(range(4)) + bytes(12)
        with pytest.raises(RowsDiffer, match=r"block 1 differ.*Namespace.variant") as error:
            await place.store.put(NAMESPACE, range(8), other)
        assert error.value.block == 1
        variant = Namespace("m", weight_version="1", variant="1")
        await place.store.put(variant, range(8), other)
        assert await place.store.get(variant, range(8)) == other
        assert await place.get(range(8)) == rows(range(8))


async def test_a_collision_of_keys_in_memory_is_seen() -> None:
    """Played by other tokens in the index of memory. The SSD tier still has the right ones."""
    async with opened(Place()) as place:
        await place.put(range(8))
        (node,) = place.store.engine.cpu_cache_engine.index.nodes()
        tokens, node.tokens = node.tokens, bytearray(len(node.tokens))
        assert await place.get(range(8)) == rows(range(8))
        assert place.ssd.reads == 2
        with pytest.raises(RowsDiffer, match="tier memory: the rows of block 0"):
            await place.put(range(8))
        node.tokens = tokens


async def test_a_collision_of_keys_in_a_lower_tier_is_seen() -> None:
    async with opened(Place()) as place:
        await place.put(range(8))
        place.clear_memory()
        assert place.store.engine.ssd_cache_engine is not None
        (node,) = place.store.engine.ssd_cache_engine.index.nodes()
        node.tokens, tokens = bytearray(len(node.tokens)), node.tokens
        assert await place.get(range(8)) == b""
        with pytest.raises(RowsDiffer, match="tier ssd: the rows of block 0"):
            await place.put(range(8))
        node.tokens = tokens
        assert await place.get(range(8)) == rows(range(8))


class ReadOnlyMemory(PlainMemory):
    """An arena whose blocks cannot be written."""

    def stretches(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [stretch.toreadonly() for stretch in super().stretches(block_ids)]


async def test_memory_that_cannot_be_written_is_an_outcome() -> None:
    place = Place()
    place.store = TieredStore(LAYOUT, ReadOnlyMemory(LAYOUT.block_bytes, 8), place.ssd)
    async with place.store:
        with pytest.raises(NotStored, match="read-only"):
            await place.put(range(8))
    assert place.store.engine.cpu_cache_engine.mempool.num_used_blocks == 0
    assert place.ssd.slots == {}


async def test_an_unknown_error_of_a_plan_is_raised() -> None:
    async with opened(Place()) as place:
        await place.put(range(8))
        place.clear_memory()
        place.ssd.gate = Event()
        async with create_task_group() as group:
            group.start_soon(_get_that_is_aborted, place)
            await wait_all_tasks_blocked()
            assert place.store._executor is not None
            scheduler = place.store._executor.scheduler
            scheduler.abort(next(iter(scheduler.graphs)), OSError("aborted"))
            place.ssd.gate.set()


async def _get_that_is_aborted(place: Place) -> None:
    with pytest.raises(OSError, match="aborted"):
        await place.get(range(8))


async def test_a_released_plan_lends_no_memory() -> None:
    async with opened(Place()) as place:
        plan = place.store.engine.get(place.store.sequence_meta(NAMESPACE, range(8)))
        assert isinstance(plan, Plan)
        plan.release()
        with pytest.raises(ValueError, match="released"):
            plan.lock()


async def test_ids_of_a_stale_match_are_recycled() -> None:
    place = Place()
    engine, sequence = place.store.engine.cpu_cache_engine, place.store.sequence_meta(NAMESPACE, range(8))
    match = engine.index.match_prefix(sequence)
    for is_stale in (False, True):
        ids = engine.take(2, match.last_node)
        if is_stale:
            with pytest.raises(StaleMatch):
                engine.insert(sequence, ids, match, bytes(16))
        else:
            engine.insert(sequence, ids, match, bytes(16))
    assert engine.mempool.num_used_blocks == 2
    engine.drop(place.store.sequence_meta(NAMESPACE, range(50)), 7, lambda node, start: None)
    assert engine.mempool.num_used_blocks == 2


async def test_rows_of_another_size_are_refused() -> None:
    async with opened(Place()) as place:
        with pytest.raises(ValueError, match="3 tokens have 9 bytes of rows, got 8"):
            await place.store.put(NAMESPACE, [1, 2, 3], bytes(8))


async def test_a_tier_of_another_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match="tier memory has blocks of 7 bytes, the layout 60"):
        TieredStore(LAYOUT, PlainMemory(7, 1))


async def test_a_closed_store_says_so() -> None:
    place = Place()
    for call in (place.put, place.get):
        with pytest.raises(RuntimeError, match="not open"):
            await call(range(8))
    place.check_quiet()


async def test_an_error_within_an_open_store_stays_as_it_is() -> None:
    async def fail(place: Place) -> None:
        async with place.store:
            await place.put(range(8))
            raise ZeroDivisionError

    place = Place()
    with pytest.raises(ZeroDivisionError):
        await fail(place)
    place.check_quiet()


async def test_a_put_waits_for_room_that_transfers_use() -> None:
    async with opened(Place(memory=2, ssd=4)) as place, create_task_group() as group:
        place.ssd.gate = Event()
        results: list[PutResult] = []

        async def put(begin: int) -> None:
            results.append(await place.put(range(begin, begin + 8)))

        for begin in range(0, 200, 20):
            group.start_soon(put, begin)
        await wait_all_tasks_blocked()
        assert (results, place.ssd.writes) == ([], 0)
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert [result.is_stored("ssd") for result in results] == [True] * 10


async def test_a_put_leaves_out_a_tier_that_stays_crowded() -> None:
    async with opened(Place(memory=8, ssd=2, wait_s=0)) as place, create_task_group() as group:
        place.ssd.gate = Event()
        group.start_soon(place.put, range(8))
        await wait_all_tasks_blocked()
        result = await place.put(range(20, 28))
        assert isinstance(result.outcomes["ssd"], NotEnoughSpaceError)
        assert result.is_stored("memory")
        place.ssd.gate.set()


# the faults of the original


async def test_unready_source_blocks_are_waited_for() -> None:
    async with opened(Place()) as place, create_task_group() as group:
        place.ssd.gate = Event()
        group.start_soon(place.put, range(8))
        await place.ssd.started.wait()
        place.clear_memory()
        found: list[bytes] = []

        async def get() -> None:
            found.append(await place.get(range(8)))

        group.start_soon(get)
        await wait_all_tasks_blocked()
        assert (found, place.ssd.reads) == ([], 0)
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert found == [rows(range(8))]


async def test_a_duplicate_put_is_kept_when_the_first_aborts() -> None:
    async with opened(Place()) as place, create_task_group() as group:
        place.ssd.gate = Event()
        place.ssd.failures = [TierFailed("ssd", "write", "/disk", "EIO")]
        results: list[PutResult] = []

        async def put() -> None:
            results.append(await place.put(range(8)))

        for _ in range(2):
            group.start_soon(put)
        await wait_all_tasks_blocked()
        assert place.ssd.writes == 0
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert sorted(result.is_stored("ssd") for result in results) == [False, True]
        assert place.ssd.writes == 2


async def test_concurrent_gets_read_once() -> None:
    async with opened(Place()) as place:
        await place.put(range(8))
        place.clear_memory()
        async with create_task_group() as group:
            for _ in range(10):
                group.start_soon(place.get, range(8))
        assert place.ssd.reads == 2


class Gets:
    """Gets that run at once, while memory has no room and the disk waits. ``found``: their rows or errors, in order."""

    def __init__(self, place: Place, group: TaskGroup) -> None:
        self.found: list[bytes | Exception] = []
        self._place = place
        self._group = group

    async def start(self, tokens: range) -> CancelScope:
        """Start a get, and wait until it waits."""
        scope = CancelScope()
        self._group.start_soon(self._get, tokens, scope)
        await wait_all_tasks_blocked()
        return scope

    async def _get(self, tokens: range, scope: CancelScope) -> None:
        with scope:
            try:
                self.found.append(await self._place.get(tokens))
            except TierFailed as error:
                self.found.append(error)


@asynccontextmanager
async def gets_without_memory() -> AsyncIterator[tuple[Place, Gets, Event]]:
    """Four blocks are stored. The reads that begin before ``place.ssd.gate`` is replaced wait for it."""
    async with opened(Place(memory=0)) as place, create_task_group() as group:
        await place.put(range(16))
        place.ssd.gate = gate = Event()
        yield place, Gets(place, group), gate
        gate.set()
        await wait_all_tasks_blocked()
    assert place.store.engine.staging.reads == {}


async def test_concurrent_gets_read_once_while_memory_is_full() -> None:
    async with gets_without_memory() as (place, gets, gate):
        for _ in range(10):
            await gets.start(range(16))
        gate.set()
        await wait_all_tasks_blocked()
        assert gets.found == [rows(range(16))] * 10
        assert place.ssd.reads == 4
        assert counted(place)["ssd"] == (40, 0, 4)


async def test_a_get_of_more_blocks_reads_only_those_that_no_other_get_reads() -> None:
    async with gets_without_memory() as (place, gets, gate):
        for stop in (8, 16, 4):
            await gets.start(range(stop))
        gate.set()
        await wait_all_tasks_blocked()
        assert sorted(map(len, gets.found)) == [12, 24, 48]  # type: ignore[arg-type]  # no errors
        assert rows(range(16)) in gets.found
        assert place.ssd.reads == 4
        assert counted(place)["ssd"] == (7, 0, 4)


async def test_the_first_of_the_gets_that_share_a_read_may_be_cancelled() -> None:
    async with gets_without_memory() as (place, gets, gate):
        first = await gets.start(range(16))
        second = await gets.start(range(16))
        await gets.start(range(16))
        first.cancel()
        second.cancel()
        await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()
        assert gets.found == [rows(range(16))]
        assert place.ssd.reads == 4


async def test_the_next_get_reads_when_a_shared_read_fails() -> None:
    async with gets_without_memory() as (place, gets, gate):
        place.ssd.failures = [TierFailed("ssd", "read", "/disk", "EIO")]
        for _ in range(3):
            await gets.start(range(16))
        gate.set()
        await wait_all_tasks_blocked()
        assert isinstance(gets.found[0], TierFailed)
        assert gets.found[1:] == [rows(range(16))] * 2
        assert place.ssd.reads == 4


async def test_rows_that_were_replaced_during_a_shared_read_are_read_again() -> None:
    async with gets_without_memory() as (place, gets, gate):
        await gets.start(range(16))
        place.ssd.gate = None
        place.store.forget(NAMESPACE, range(4))
        await place.store.put(NAMESPACE, range(16), bytes(48))
        await gets.start(range(16))
        gate.set()
        await wait_all_tasks_blocked()
        assert gets.found == [rows(range(16)), bytes(48)]


async def test_buffers_of_a_shared_read_are_freed_with_their_last_user() -> None:
    async with gets_without_memory() as (place, gets, gate):
        await gets.start(range(8))
        given_back = [Event(), Event()]
        buffers: list[object] = []

        async def borrow(number: int) -> None:
            async with place.store.borrow(NAMESPACE, range(8)) as borrowed:
                buffers.append(borrowed.pieces[0].obj)
                await given_back[number].wait()

        async with create_task_group() as group:
            for number in range(2):
                group.start_soon(borrow, number)
            await wait_all_tasks_blocked()
            gate.set()
            await wait_all_tasks_blocked()
            one, two = buffers
            assert one is two
            buffers.clear()
            del two
            given_back[0].set()
            await wait_all_tasks_blocked()
            assert sys.getrefcount(one) > 2
            given_back[1].set()
        gc.collect()
        assert sys.getrefcount(one) == 2  # the name, and the argument of the call


async def test_no_hole_is_left_after_an_abort_between_forks() -> None:
    async with opened(Place()) as place, create_task_group() as group:
        await place.put(range(8))
        place.ssd.gate = Event()
        place.ssd.failures = [TierFailed("ssd", "write", "/disk", "EIO"), None]
        group.start_soon(place.put, range(16))
        await wait_all_tasks_blocked()
        group.start_soon(place.put, range(24))
        await wait_all_tasks_blocked()
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        place.clear_memory()
        assert await place.get(range(24)) == rows(range(24))


async def test_no_id_is_owned_twice_after_a_reset_with_plans_in_flight() -> None:
    async with opened(Place(ssd=4)) as place, create_task_group() as group:
        place.ssd.gate = Event()
        results: list[PutResult] = []

        async def put(tokens: range) -> None:
            results.append(await place.put(tokens))

        group.start_soon(put, range(8))
        await wait_all_tasks_blocked()
        place.store.reset()
        group.start_soon(put, range(100, 108))
        await wait_all_tasks_blocked()
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert sorted(result.is_stored("ssd") for result in results) == [False, True]
        assert await place.get(range(8)) == b""
        assert await place.get(range(100, 108)) == rows(range(100, 108))


async def test_no_lock_is_left_behind_by_an_exception() -> None:
    async with opened(Place(memory=2)) as place:
        await place.put(range(8))
        place.clear_memory()
        place.ssd.failures = [ZeroDivisionError()]
        with pytest.raises(TierFailed, match="read at an unknown place failed"):
            await place.get(range(8))
        place.check_quiet()
        assert (await place.put(range(100, 108))).is_stored("memory")


class FailingShared(PlainShared):
    """A remote tier that cannot forget."""

    def forget(self, blocks: Sequence[Block]) -> None:
        raise ZeroDivisionError


async def test_no_lock_is_left_behind_by_an_exception_in_a_plan() -> None:
    """The last tier of the plan raises when it has to make room."""
    place = Place(memory=4)
    place.remote = FailingShared(LAYOUT.block_bytes, 4)
    place.store = TieredStore(LAYOUT, place.memory, place.ssd, place.remote)
    async with opened(place):
        await place.put(range(8))
        await place.put(range(100, 108))
        with pytest.raises(ZeroDivisionError):
            await place.put(range(200, 208))
        place.check_quiet()
        assert (await place.put(range(300, 308))).is_stored("remote")
        place.clear_memory()
        with pytest.raises(ZeroDivisionError):
            await place.get(range(8))
        place.check_quiet()


async def test_no_shared_read_is_left_behind_by_an_exception_in_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks are to be read from SSD, and written to the remote tier, which raises when it has to make room."""
    async with opened(Place(memory=0, remote=2)) as place:
        await place.put(range(8))
        await place.put(range(100, 108))
        with monkeypatch.context() as patch:
            patch.setattr(place.remote, "forget", FailingShared.forget.__get__(place.remote))
            with pytest.raises(ZeroDivisionError):
                await place.get(range(8))
        assert place.store.engine.staging.reads == {}
        assert await place.get(range(8)) == rows(range(8))


async def test_a_short_read_is_not_success() -> None:
    """A tier that fills a part of a buffer and says nothing."""
    async with opened(Place()) as place:
        await place.put(range(8))
        place.clear_memory()
        slot = next(iter(place.ssd.slots))
        key, data = place.ssd.slots[slot]
        place.ssd.slots[slot] = (key, data[:-1] + bytes([data[-1] ^ 1]))
        kept = await place.get(range(8))
        assert kept == rows(range(8))[: len(kept)]
        assert len(kept) < 24


async def test_a_failed_remote_is_not_a_miss() -> None:
    async with opened(Place(remote=16)) as place:
        place.remote.unreachable = True
        with pytest.raises(TierFailed, match="holds"):
            await place.get(range(8))
        await place.put(range(8))
        assert await place.get(range(8)) == rows(range(8))
        place.remote.unreachable = False
        assert await place.get(range(12)) == rows(range(8))


async def test_a_failed_tier_is_left_out_when_another_has_the_blocks() -> None:
    async with opened(Place(remote=16)) as place:
        await place.put(range(8))
        place.clear_memory()
        place.ssd.failures = [TierFailed("ssd", "read", "/disk", "EIO")]
        assert await place.get(range(8)) == rows(range(8))
        assert place.remote.reads == 2


async def test_stale_data_is_not_found_after_a_weight_update() -> None:
    async with opened(Place()) as place:
        await place.put(range(8))
        assert await place.store.get(Namespace("m", weight_version="2"), range(8)) == b""
        assert await place.get(range(8)) == rows(range(8))


async def test_a_reset_forgets_recovered_blocks_that_are_being_read() -> None:
    async with opened(Place()) as first:
        await first.put(range(8))
    async with opened(first.restart()) as place, create_task_group() as group:
        place.ssd.gate = Event()
        place.ssd.failures = [TierFailed("ssd", "read", "/disk", "EIO")]

        async def get() -> None:
            with pytest.raises(TierFailed):
                await place.get(range(8))

        group.start_soon(get)
        await wait_all_tasks_blocked()
        place.store.reset()
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert place.ssd.slots == {}
        assert await place.get(range(8)) == b""


async def test_forgotten_blocks_that_are_being_read_do_not_come_back(memory: int) -> None:
    """Blocks of an earlier process enter the index when they have been read."""
    async with opened(Place()) as first:
        await first.put(range(8))
    async with opened(first.restart(memory)) as place, create_task_group() as group:
        place.ssd.gate = Event()
        group.start_soon(place.get, range(8))
        await wait_all_tasks_blocked()
        place.store.forget(NAMESPACE, range(8))
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert place.ssd.slots == {}
        assert await place.get(range(8)) == b""


# restarts and other processes


async def test_a_restart_finds_what_was_stored() -> None:
    async with opened(Place()) as first:
        await first.put(range(10))
    async with opened(first.restart()) as place:
        assert await place.get(range(10)) == rows(range(10))
        assert place.store.engine.ssd_cache_engine is not None
        assert place.store.engine.ssd_cache_engine.recovered == {}
        place.clear_memory()
        assert await place.get(range(10)) == rows(range(10))
        assert (place.ssd.writes, place.ssd.reads) == (3, 6)


async def test_recovered_blocks_behind_those_in_memory_are_read() -> None:
    async with opened(Place(remote=16)) as first:
        await first.put(range(16))
    async with opened(first.restart(memory=4)) as place:
        place.ssd.reads = place.remote.reads = 0
        place.ssd.failures = [TierFailed("ssd", "read", "/disk", "EIO")]
        assert await place.get(range(8)) == rows(range(8))
        assert (place.ssd.reads, place.remote.reads) == (0, 2)
        assert await place.get(range(16)) == rows(range(16))
        assert (place.ssd.reads, place.remote.reads) == (2, 2)
        assert place.store.engine.ssd_cache_engine is not None
        assert len(place.store.engine.ssd_cache_engine.recovered) == 4
        await place.put(range(100, 116))
        assert place.lost == []


async def test_recovered_blocks_that_are_being_read_are_no_miss() -> None:
    """Memory has no room, so the second get finds no unready blocks there to wait for."""
    async with opened(Place()) as first:
        await first.put(range(8))
    place = first.restart(memory=0)
    async with opened(place), create_task_group() as group:
        place.ssd.gate = Event()
        found: list[bytes] = []

        async def get() -> None:
            found.append(await place.get(range(8)))

        for _ in range(2):
            group.start_soon(get)
        await wait_all_tasks_blocked()
        assert found == []
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert found == [rows(range(8))] * 2
        assert place.ssd.reads == 2


async def test_a_put_during_the_read_of_recovered_blocks_wins() -> None:
    async with opened(Place()) as first:
        await first.put(range(8))
    place = first.restart(memory=0)
    async with opened(place), create_task_group() as group:
        place.ssd.gate = Event()
        group.start_soon(place.get, range(8))
        await wait_all_tasks_blocked()
        group.start_soon(place.put, range(8))
        await wait_all_tasks_blocked()
        place.ssd.gate.set()
        await wait_all_tasks_blocked()
        assert await place.get(range(8)) == rows(range(8))
        assert len(place.ssd.slots) == 2


async def test_a_put_replaces_recovered_blocks() -> None:
    async with opened(Place()) as first:
        await first.put(range(8))
    async with opened(first.restart()) as place:
        other = bytes(24)
        await place.store.put(NAMESPACE, range(8), other)
        place.clear_memory()
        assert await place.store.get(NAMESPACE, range(8)) == other


async def test_recovered_blocks_make_room_for_new_ones() -> None:
    async with opened(Place(ssd=4)) as first:
        await first.put(range(12))
    async with opened(first.restart()) as place:
        assert (await place.put(range(100, 112))).is_stored("ssd")
        assert len(place.ssd.slots) == 4


async def test_a_recovered_block_that_is_corrupt_is_forgotten() -> None:
    async with opened(Place()) as first:
        await first.put(range(8))
    first.ssd.slots = {slot: (key, data[:-1] + b"\xff") for slot, (key, data) in first.ssd.slots.items()}
    async with opened(first.restart()) as place:
        assert await place.get(range(8)) == b""
        assert (await place.put(range(8))).is_stored("ssd")


async def test_concurrent_gets_read_once_what_another_process_wrote() -> None:
    async with opened(Place(ssd=None, remote=16)) as first:
        await first.put(range(10))
    async with opened(first.restart(memory=0)) as place, create_task_group() as group:
        place.remote.gate = Event()
        gets = Gets(place, group)
        for _ in range(3):
            await gets.start(range(10))
        place.remote.gate.set()
        await wait_all_tasks_blocked()
        assert gets.found == [rows(range(10))] * 3
        assert place.remote.reads == 3


async def test_another_process_reads_what_the_first_wrote() -> None:
    async with opened(Place(ssd=None, remote=16)) as first:
        await first.put(range(10))
    async with opened(first.restart()) as place:
        assert await place.get(range(10)) == rows(range(10))
        assert (place.remote.reads, place.remote.writes) == (3, 3)


async def test_rows_that_another_process_overwrote_are_neither_given_nor_deleted() -> None:
    async with opened(Place(ssd=None, remote=16)) as first:
        await first.put(range(8))
        other = first.restart()
        async with other.store:
            await other.store.put(NAMESPACE, range(8), bytes(24))
            first.clear_memory()
            with pytest.raises(BlockReplaced, match="other rows"):
                await _read_known_blocks(first)
            other.clear_memory()
            assert await other.store.get(NAMESPACE, range(8)) == bytes(24)


async def _read_known_blocks(place: Place) -> None:
    plan = place.store.engine.get(place.store.sequence_meta(NAMESPACE, range(8)))
    assert isinstance(plan, Plan)
    error = await place.store._run(plan, release=True)
    assert error is not None
    raise error


# losses


async def test_blocks_that_leave_the_last_tier_are_told() -> None:
    async with opened(Place(memory=4, ssd=2)) as place:
        await place.put(range(8))
        await place.put(range(100, 108))
        assert place.lost == []
        await place.put(range(200, 208))
        assert place.lost == place.store.sequence_meta(NAMESPACE, range(8)).keys(0, 2)[::1]


async def test_corrupt_blocks_of_the_last_tier_are_told() -> None:
    async with opened(Place()) as place:
        await place.put(range(8))
        await place.put(range(16))
        place.clear_memory()
        slot = next(iter(place.ssd.slots))
        place.ssd.slots[slot] = (place.ssd.slots[slot][0], bytes(LAYOUT.block_bytes))
        assert await place.get(range(16)) == b""
        assert set(place.lost) == set(place.store.sequence_meta(NAMESPACE, range(16)).keys(0, 4))


# long work


async def test_long_rows_are_copied_and_verified_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered, so that each copy and hash runs in a thread."""
    monkeypatch.setattr(off_loop, "_LONG_BYTES", 1)
    async with opened(Place(memory=3)) as place:
        async with create_task_group() as group:
            for begin in range(0, 100, 10):
                group.start_soon(place.put, range(begin, begin + 10))
        for begin in range(70, 100, 10):
            kept = await place.get(range(begin, begin + 10))
            assert kept == rows(range(begin, begin + 10))[: len(kept)]
        slot = next(iter(place.ssd.slots))
        place.ssd.slots[slot] = (place.ssd.slots[slot][0], bytes(LAYOUT.block_bytes))
        for begin in range(0, 100, 10):
            kept = await place.get(range(begin, begin + 10))
            assert kept == rows(range(begin, begin + 10))[: len(kept)]


# cancellation


class HeldLayout(Layout):
    """A layout whose copies into memory wait for ``gate``, in their thread."""

    gate = threading.Event()

    def write(self, *arguments: Any) -> None:
        assert self.gate.wait(5)
        super().write(*arguments)


async def test_a_cancelled_put_ends_when_its_rows_are_no_longer_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may reuse the memory of the rows then."""
    monkeypatch.setattr(off_loop, "_LONG_BYTES", 1)
    monkeypatch.setattr(HeldLayout, "gate", threading.Event())
    layout = HeldLayout(4, 3)
    data = bytearray(rows(range(8)))
    ended: list[bool] = []

    async def put(scope: CancelScope) -> None:
        with scope:
            await store.put(NAMESPACE, range(8), memoryview(data))
        ended.append(scope.cancelled_caught)
        data[:] = bytes(24)

    async with TieredStore(layout, PlainMemory(LAYOUT.block_bytes, 8)) as store, create_task_group() as group:
        scope = CancelScope()
        group.start_soon(put, scope)
        while not store.engine.cpu_cache_engine.mempool.num_used_blocks:
            await checkpoint()
        scope.cancel()
        for _ in range(9):
            await checkpoint()
        assert ended == []
        layout.gate.set()
        assert await store.get(NAMESPACE, range(8)) == rows(range(8))
        assert ended == [True]


@pytest.mark.parametrize("steps", range(6))
async def test_a_cancelled_call_leaves_nothing_behind(steps: int) -> None:
    async with opened(Place(remote=16)) as place:
        await place.put(range(8))
        place.clear_memory()
        for call in (place.get, place.put):
            async with create_task_group() as group:
                group.start_soon(call, range(12))
                for _ in range(steps):
                    await _step()
                group.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        place.check_quiet()
        assert await place.get(range(8)) == rows(range(8))


async def _step() -> None:
    event = Event()
    event.set()
    await event.wait()


async def test_a_cancelled_store_ends_what_runs_and_what_waits() -> None:
    place = Place(remote=16)
    with CancelScope() as scope:
        async with place.store, create_task_group() as group:
            place.ssd.gate = place.remote.gate = Event()
            group.start_soon(place.put, range(8))
            group.start_soon(place.put, range(12))
            await wait_all_tasks_blocked()
            scope.cancel()
    place.check_quiet()
