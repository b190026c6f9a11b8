"""The SSD tier with direct transfers: several threads, errors of single runs, random faults."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
import pytest

from deadlines import until
from slime_tiered_store.errors import TierFailed, TierFull
from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.block_header import HEADER_BYTES, Buffer
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import HungDisk, SlowDisk, content_of, is_direct, key_of, write_any

pytestmark = pytest.mark.anyio

PAGE = 4096


def is_blocks(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith("/blocks")


def blocks_at(places: Sequence[int]) -> list[Block]:
    return [Block(place, key_of(place)) for place in places]


def contents_of(places: Sequence[int], size: int) -> list[memoryview]:
    return [memoryview(content_of(place, size)) for place in places]


async def contents(tier: SsdTier, places: Sequence[int], size: int) -> list[memoryview]:
    into = [memoryview(bytearray(size)) for _ in places]
    await tier.read(blocks_at(places), into)
    return into


@pytest.mark.parametrize("slot_bytes", [PAGE, 96 << 10])
async def test_long_calls_are_direct_and_short_ones_are_not(tmp_path: Path, slot_bytes: int) -> None:
    calls: set[tuple[str, bool]] = set()

    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if is_blocks(fd):
            calls.add(("write", is_direct(fd)))
        return os.pwritev(fd, pieces, offset)

    def preadv(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if is_blocks(fd):
            calls.add(("read", is_direct(fd)))
        return os.preadv(fd, pieces, offset)

    size = slot_bytes - HEADER_BYTES
    slots = (9 << 20) // slot_bytes
    ops = FileOps(pwritev=pwritev, preadv=preadv)
    tier = await SsdTier.open([tmp_path], Layout(size, slots).total_bytes, size, ops)
    places = range(slots)
    expected = contents_of(places, size)

    async def write(some: Sequence[int], sources: Sequence[memoryview] | None = None) -> set[bool]:
        calls.clear()
        tier.forget(blocks_at(some))
        await tier.write(blocks_at(some), sources or [expected[place] for place in some])
        assert {name for name, _ in calls} == {"write"}
        return {direct for _, direct in calls}

    async def read(some: Sequence[int]) -> set[bool]:
        calls.clear()
        assert await contents(tier, some, size) == [expected[place] for place in some]
        assert {name for name, _ in calls} == {"read"}
        return {direct for _, direct in calls}

    assert await write(places) == {True}
    assert await read(places) == {True}
    assert await write(places[:1]) == {False}
    assert await read(places[: (1020 << 10) // slot_bytes]) == {False}
    assert await read(places[: -(-(1 << 20) // slot_bytes)]) == {True}
    assert await write(places[: -(-(256 << 10) // slot_bytes)]) == {True}
    assert await write(places[: (252 << 10) // slot_bytes]) == {False}
    scattered = places[::2]
    assert await write(scattered) == {slot_bytes > PAGE}
    assert await read(scattered) == {slot_bytes > PAGE}
    short = [expected[place] if place else expected[0][: size - PAGE] for place in places[:100]]
    if slot_bytes > PAGE:  # an unused page
        assert await write(places[:3], short[:3]) == {False}
    await tier.aclose()


def test_read_that_ends_after_its_loop_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = HungDisk()
    loop = asyncio.new_event_loop()
    tier = loop.run_until_complete(SsdTier.open([tmp_path], Layout(40, 8).total_bytes, 40, disk.ops))
    loop.run_until_complete(tier.write(blocks_at([0]), contents_of([0], 40)))
    reading = loop.create_task(contents(tier, [0], 40))
    while not disk.waiting:
        loop.run_until_complete(asyncio.sleep(0.005))
    loop.close()
    disk.go.set()
    anyio.run(tier.aclose)
    assert not reading.done()
    reading.get_coro().close()
    assert not caplog.records


async def test_failed_run_fails_its_own_call_only(tmp_path: Path) -> None:
    """Calls of one batch: direct ones and one that the page cache takes. Each has two runs."""
    size, slots = 2 * PAGE - HEADER_BYTES, 64
    disk = SlowDisk()
    broken = {12, 52}

    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if is_blocks(fd):
            disk.pwritev(fd, [], offset)
            if offset // (2 * PAGE) in broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwritev(fd, pieces, offset)

    ops = FileOps(pwritev=pwritev, direct_bytes=4 * PAGE)
    tier = await SsdTier.open([tmp_path], Layout(size, slots).total_bytes, size, ops)
    failed: list[int] = []

    async def write(*places: int) -> None:
        try:
            await tier.write(blocks_at(places), contents_of(places, size))
        except (TierFailed, TierFull):
            failed.append(places[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, 0)
        await until(disk.began.is_set)
        for first in (5, 10, 20, 30):
            tasks.start_soon(write, first, first + 2, first + 3, first + 5, first + 6)
        tasks.start_soon(write, 40, 42)
        tasks.start_soon(write, 50, 52)
        await until(lambda: tier.counts.pending_bytes == 25 * size)
        disk.go.set()
    assert sorted(failed) == [10, 50]
    intact = [0, *(first + place for first in (5, 20, 30) for place in (0, 2, 3, 5, 6)), 40, 42]
    assert sorted(tier.recovered().values()) == sorted(intact)
    assert await contents(tier, intact, size) == contents_of(intact, size)
    broken.clear()
    await write(10, 12, 13)
    assert await contents(tier, [12, 13], size) == contents_of([12, 13], size)
    await tier.aclose()


async def test_bug_in_one_thread_ends_the_call_after_all_threads(tmp_path: Path) -> None:
    size = PAGE - HEADER_BYTES
    go, begun, running = threading.Event(), threading.Semaphore(0), [0]

    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if not is_blocks(fd):
            return os.pwritev(fd, pieces, offset)
        if threading.current_thread().name == "ssd-write_0":  # the thread that waits for the others
            for _ in range(3):
                begun.acquire()
            raise ZeroDivisionError
        running[0] += 1
        begun.release()
        go.wait()
        running[0] -= 1
        return os.pwritev(fd, pieces, offset)

    tier = await SsdTier.open(
        [tmp_path], Layout(size, 32).total_bytes, size, FileOps(pwritev=pwritev, direct_bytes=1)
    )
    ended: list[type[BaseException]] = []

    async def write() -> None:
        places = range(0, 16, 2)
        try:
            await tier.write(blocks_at(places), contents_of(places, size))
        except ZeroDivisionError as error:
            ended.append(type(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await until(lambda: running[0] == 3)
        await anyio.sleep(0.02)
        assert not ended
        go.set()
    assert ended == [ZeroDivisionError]
    assert running == [0]
    assert not tier.recovered()
    await tier.aclose()


@dataclass
class BadDisk:
    """Transfers of blocks stop short, at pages or elsewhere, or fail."""

    random: Random
    is_on: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _size(self, fd: int, size: int) -> int:
        with self._lock:
            if not self.is_on or not is_blocks(fd):
                return size
            match self.random.randrange(20):
                case 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                case 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                case 2 | 3:
                    return self.random.randrange(1, size + 1)
                case 4 | 5:
                    return -(-self.random.randrange(1, size + 1) // PAGE) * PAGE
            return size

    def pwritev(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        piece = memoryview(pieces[0])
        piece = piece[: self._size(fd, len(piece))]
        if not is_direct(fd) or len(piece) % PAGE == 0:
            return os.pwritev(fd, [piece], offset)
        write_any(fd, bytes(piece), offset)
        return len(piece)

    def preadv(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        piece = memoryview(pieces[0])
        piece = piece[: self._size(fd, len(piece))]
        if not is_direct(fd) or len(piece) % PAGE == 0:
            return os.preadv(fd, [piece], offset)
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            return os.preadv(file.fileno(), [piece], offset)


@pytest.mark.parametrize("size", [1, 4031, 10_007])
async def test_random_faults_and_cancellations_damage_no_block(tmp_path: Path, size: int) -> None:
    random, slots = Random(size), 40
    disk = BadDisk(random)
    ops = FileOps(pwritev=disk.pwritev, preadv=disk.preadv, fdatasync=lambda fd: None, direct_bytes=2 * PAGE)
    paths, total = [tmp_path / "a", tmp_path / "b"], 2 * Layout(size, slots).total_bytes
    tier = await SsdTier.open(paths, total, size, ops)
    held: dict[int, tuple[int, int]] = {}  # by slot: the number of its block, and its length
    number = 0

    async def write(places: list[int]) -> None:
        nonlocal number
        new = {place: (number + at, random.randrange(size + 1)) for at, place in enumerate(places)}
        number += len(places)
        tier.forget([Block(place, key_of(held.pop(place)[0])) for place in places if place in held])
        blocks = [Block(place, key_of(block)) for place, (block, _) in new.items()]
        try:
            with anyio.move_on_after(random.choice([0, 0.001, 10])) as scope:
                await tier.write(blocks, [memoryview(content_of(*each)) for each in new.values()])
                held.update(new)
        except (TierFailed, TierFull):
            pass
        if scope.cancelled_caught or places[0] not in held:
            tier.forget(blocks)

    async def read() -> None:
        chosen = random.sample(sorted(held), min(len(held), random.randrange(1, 60)))
        into = [memoryview(bytearray(held[place][1])) for place in chosen]
        try:
            await tier.read([Block(place, key_of(held[place][0])) for place in chosen], into)
        except (TierFailed, TierFull):
            return
        assert into == [content_of(*held[place]) for place in chosen]

    for life in range(3):
        for _ in range(40):
            places = random.sample(range(tier.capacity), tier.capacity)
            some = [sorted(places[at : at + 15]) for at in (0, 15, 30)]
            async with anyio.create_task_group() as tasks:
                for each in some:
                    tasks.start_soon(write, each)
            await read()
        await tier.aclose()
        disk.is_on = life == 1
        tier = await SsdTier.open(paths, total, size, ops)
        assert tier.recovered() == {key_of(block): place for place, (block, _) in held.items()}
    await read()
    await tier.aclose()
