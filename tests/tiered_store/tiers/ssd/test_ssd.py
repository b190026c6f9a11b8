"""The SSD tier: what it stores, and disks that are full, broken, slow or in use."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest

from deadlines import HANG_S, until
from router_core.errors import StartupError
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, TierBusy, TierFailed, TierFull
from slime_tiered_store.tier import Block, Tier
from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.tier import SsdTier
from tiered_store.tiers.disks import (
    BLOCK_BYTES,
    UNSYNCED,
    DiskFaults,
    HungDisk,
    SlowDisk,
    content_of,
    got,
    is_intact,
    key_of,
    newer_index,
    put,
)

pytestmark = pytest.mark.anyio
SLOTS = 16
SIZE = Layout(BLOCK_BYTES, SLOTS).total_bytes


async def opened(*paths: Path, ops: FileOps | None = None, size: int = SIZE) -> SsdTier:
    return await SsdTier.open(paths, size * len(paths), BLOCK_BYTES, ops)


async def test_blocks_are_striped_over_directories_and_found_again(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    tier = await opened(*paths)
    assert tier.capacity == 3 * SLOTS
    numbers = {number: number for number in range(40)}
    await put(tier, numbers)
    assert [await is_intact(tier, number, number) for number in numbers] == [True] * 40
    await tier.aclose()
    again = await opened(*paths)
    assert again.recovered() == {key_of(number): number for number in numbers}
    await again.aclose()
    turned = await opened(*paths[::-1])  # any order will do: a directory stands for itself
    for key, place in turned.recovered().items():
        (number,) = [number for number in numbers if key_of(number) == key]
        assert await is_intact(turned, number, place)
    assert len(turned.recovered()) == 40
    assert turned.counts.read_blocks == 40
    await turned.aclose()


async def test_a_directory_that_is_added_gets_blocks_too(tmp_path: Path) -> None:
    first = await opened(tmp_path / "a")
    await put(first, {1: 5})
    await first.aclose()
    both = await opened(tmp_path / "a", tmp_path / "b")
    assert both.capacity == 2 * SLOTS
    assert both.recovered() == {key_of(1): 10}
    assert await is_intact(both, 1, 10)
    await both.aclose()


async def test_a_block_may_be_short_and_may_be_read_in_part(tmp_path: Path) -> None:
    tier: Tier = await opened(tmp_path)
    assert isinstance(tier, SsdTier)
    await put(tier, {1: 0}, size=37)
    await put(tier, {2: 1}, size=0)
    assert await got(tier, 1, 0, size=37) == content_of(1, 37)
    assert await got(tier, 1, 0, size=10) == content_of(1, 37)[:10]
    assert await got(tier, 2, 1, size=0) == b""
    with pytest.raises(BlockCorrupt, match="it has 37 bytes instead of 38"):
        await got(tier, 1, 0, size=38)
    with pytest.raises(ValueError, match="a block has at most 200 bytes, got 201"):
        await put(tier, {3: 2}, size=201)
    with pytest.raises(ValueError, match="a block has at most 200 bytes, got 201"):
        await got(tier, 1, 0, size=201)
    await tier.write([], [])
    await tier.read([], [])
    await tier.aclose()


async def test_a_block_that_is_not_there_is_missing(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await put(tier, {1: 0})
    for number, place in [(2, 0), (1, 1)]:
        with pytest.raises(BlockMissing) as missing:
            await got(tier, number, place)
        assert missing.value.key == key_of(number)
    for place in (-1, SLOTS):
        with pytest.raises(IndexError, match="has the blocks 0 to 15, not"):
            await got(tier, 1, place)
    await tier.aclose()


async def test_forgotten_blocks_are_gone_at_once_and_after_a_start(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await put(tier, {number: number for number in range(4)})
    tier.forget([Block(1, key_of(1)), Block(2, key_of(9)), Block(7, key_of(7))])
    with pytest.raises(BlockMissing):
        await got(tier, 1, 1)
    await put(tier, {5: 1})
    tier.forget([Block(1, key_of(1))])  # another block lies there now
    assert await is_intact(tier, 5, 1)
    tier.forget([Block(3, key_of(3))])
    await tier.aclose()
    again = await opened(tmp_path)
    assert again.recovered() == {key_of(0): 0, key_of(5): 1, key_of(2): 2}
    await again.aclose()


async def test_forgotten_block_among_adjacent_ones_is_named_when_they_are_read(tmp_path: Path) -> None:
    tier = await opened(tmp_path, ops=UNSYNCED)
    blocks = [Block(number, key_of(number)) for number in range(8)]
    await put(tier, {number: number for number in range(8)})
    tier.forget([blocks[5], blocks[3]])
    with pytest.raises(BlockMissing) as missing:
        await tier.read(blocks, [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks])
    assert missing.value.key == key_of(3)
    for left in (blocks[:3], blocks[6:]):
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in left]
        await tier.read(left, into)
        assert into == [content_of(block.id) for block in left]
    tier.forget(blocks[1:])
    assert tier.recovered() == {key_of(0): 0}
    await put(tier, {9: 3})
    await tier.aclose()
    again = await opened(tmp_path)
    assert again.recovered() == {key_of(0): 0, key_of(9): 3}
    await again.aclose()


async def test_adjacent_blocks_of_any_length_keep_apart(tmp_path: Path) -> None:
    size = 5000  # a slot has two pages, a short block one
    tier = await SsdTier.open([tmp_path], Layout(size, 600).total_bytes, size, UNSYNCED)
    lengths = [size, 4032, 4033, 1, 0, size, size, 4032, *[size] * 300, 17]
    blocks = [Block(2 * (number > 100) + number, key_of(number)) for number in range(len(lengths))]
    sources = [memoryview(content_of(number, length)) for number, length in enumerate(lengths)]
    await tier.write(blocks, sources)
    into = [memoryview(bytearray(length)) for length in lengths]
    await tier.read(blocks, into)
    assert into == sources
    mixed = list(range(len(lengths)))
    Random(3).shuffle(mixed)
    into = [memoryview(bytearray(lengths[number] // 2)) for number in mixed]
    await tier.read([blocks[number] for number in mixed], into)
    assert into == [sources[number][: lengths[number] // 2] for number in mixed]
    await tier.aclose()


async def test_the_index_is_rewritten_when_it_is_full(tmp_path: Path) -> None:
    tier = await opened(tmp_path, ops=UNSYNCED)
    await put(tier, {0: 0})
    for number in range(1, 1200):
        await put(tier, {number: 1 + number % (SLOTS - 1)})
    found = tier.recovered()
    assert len(found) == SLOTS
    await tier.aclose()
    for index in newer_index(tmp_path):
        assert index.stat().st_size == 32 * (1 + 2 * SLOTS + 1024)
    again = await opened(tmp_path)
    assert again.recovered() == found
    await again.aclose()


# sizes


async def test_a_directory_grows_and_is_never_made_smaller(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    await put(tier, {1: SLOTS - 1})
    await tier.aclose()
    larger = await opened(tmp_path, size=2 * SIZE)
    assert larger.capacity > SLOTS
    await put(larger, {2: larger.capacity - 1})
    capacity = larger.capacity
    await larger.aclose()
    smaller = await opened(tmp_path)
    assert smaller.capacity == capacity
    assert await is_intact(smaller, 1, SLOTS - 1)
    assert await is_intact(smaller, 2, capacity - 1)
    await smaller.aclose()


async def test_all_space_is_allocated_at_the_start(tmp_path: Path) -> None:
    tier = await opened(tmp_path / "a")
    allocated = sum(path.stat().st_blocks * 512 for path in (tmp_path / "a").iterdir())
    assert allocated >= SIZE
    await tier.aclose()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


async def test_a_disk_without_space_fails_the_start_and_is_left_as_it_was(small_disk: Path) -> None:
    tier = await opened(small_disk / "a")
    await put(tier, {1: 0})
    await tier.aclose()
    used = os.statvfs(small_disk).f_bfree
    for path in (small_disk / "a", small_disk / "b"):
        with pytest.raises(
            StartupError, match=r"cannot be allocated: No space left on device; free space, or"
        ):
            await opened(path, size=1 << 20)
    assert os.statvfs(small_disk).f_bfree >= used - 3  # names of files
    again = await opened(small_disk / "a")
    assert await is_intact(again, 1, 0)
    await again.aclose()


async def test_a_size_for_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match=r"--store-ssd-bytes: a directory needs at least 69\d\d\d bytes for a block"
    ):
        await opened(tmp_path, size=5000)
    with pytest.raises(StartupError, match="--store-ssd-bytes: a directory has at most 4294967296 blocks"):
        await opened(tmp_path, size=10**20)


# directories that cannot be used


async def test_another_size_of_blocks_is_refused(tmp_path: Path) -> None:
    await (await opened(tmp_path)).aclose()
    with pytest.raises(StartupError, match="it has blocks of 200 bytes, not of 100; mend it, or move"):
        await SsdTier.open([tmp_path], SIZE, 100)
    await (await opened(tmp_path)).aclose()


async def test_a_directory_has_one_process(tmp_path: Path) -> None:
    tier = await opened(tmp_path / "a")
    for paths in ([tmp_path / "a"], [tmp_path / "b", tmp_path / "a"]):
        with pytest.raises(StartupError, match="a: another process uses it; give each router its own"):
            await opened(*paths)
    with pytest.raises(StartupError, match="wanted different directories, got one twice"):
        await opened(tmp_path / "c", tmp_path / "." / "c")
    await tier.aclose()
    await (await opened(tmp_path / "b", tmp_path / "a")).aclose()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "store.json is damaged"),
        ("[]", "store.json has another format than slime-store-ssd-1"),
        *(
            (
                json.dumps({"format": "slime-store-ssd-1", "block_bytes": 200, "slots": 16} | wrong),
                "is damaged",
            )
            for wrong in ({"slots": 10**30}, {"slots": -5}, {"block_bytes": -5000})
        ),
        (
            json.dumps({"format": "slime-store-ssd-2", "block_bytes": 200, "slots": 16}),
            "has another format than",
        ),
    ],
)
async def test_an_unknown_format_is_refused(tmp_path: Path, content: str, message: str) -> None:
    await (await opened(tmp_path)).aclose()
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        await opened(tmp_path)


async def test_a_damaged_index_is_refused_and_a_damaged_record_costs_its_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await opened(tmp_path)
    await put(tier, {number: number for number in range(4)})
    await tier.aclose()
    index, _ = newer_index(tmp_path)
    content = bytearray(index.read_bytes())
    content[32 * 2 + 9] ^= 1
    index.write_bytes(content)
    again = await opened(tmp_path)
    assert again.recovered() == {key_of(0): 0, key_of(2): 2, key_of(3): 3}
    assert "1 records of the index are unreadable, so their blocks are not found" in caplog.text
    await again.aclose()
    for index in newer_index(tmp_path):
        index.write_bytes(bytes(32) + index.read_bytes()[32:])
    with pytest.raises(StartupError, match="the index is damaged; mend it, or move the directory away"):
        await opened(tmp_path)


async def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(StartupError, match=r"--store-ssd .*a.*: (File exists|Not a directory)"):
            await opened(path)


# disks that fail


@pytest.mark.parametrize(
    ("call", "where"), [("pwritev", "blocks"), ("fdatasync", "blocks"), ("pwritev", "index")]
)
@pytest.mark.parametrize(
    ("code", "error"), [(errno.EIO, TierFailed), (errno.ENOSPC, TierFull), (errno.EDQUOT, TierFull)]
)
async def test_a_failed_write_is_told_and_the_tier_goes_on(
    tmp_path: Path, call: str, where: str, code: int, error: type[Exception]
) -> None:
    faults = DiskFaults(call, where, code, is_on=False)
    tier = await opened(tmp_path, ops=faults.ops)
    await put(tier, {1: 0})
    faults.is_on = True
    with pytest.raises(error):
        await put(tier, {2: 1, 3: 2})
    tier.forget([Block(1, key_of(2)), Block(2, key_of(3)), Block(0, key_of(1))])
    assert tier.recovered() == {}
    with pytest.raises(error):
        await put(tier, {1: 0})
    counts = tier.counts.as_dict()
    assert (counts["is_failing"], counts["errors"]) == (True, 2)
    assert os.strerror(code) in counts["last_error"]
    faults.is_on = False
    await put(tier, {4: 1})
    assert not tier.counts.is_failing
    await tier.aclose()
    again = await opened(tmp_path)
    assert again.recovered() == {key_of(4): 1}
    assert await is_intact(again, 4, 1)
    await again.aclose()


async def test_one_broken_directory_fails_writes_to_it_only(tmp_path: Path) -> None:
    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if "/b/blocks" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "broken")
        return os.pwritev(fd, pieces, offset)

    tier = await opened(tmp_path / "a", tmp_path / "b", ops=FileOps(pwritev=pwritev))
    with pytest.raises(TierFailed, match=r"write at .*/b failed: .* broken"):
        await put(tier, {1: 0, 2: 1})
    assert key_of(2) not in tier.recovered()
    await put(tier, {3: 2})
    assert await is_intact(tier, 3, 2)
    await tier.aclose()


async def test_a_failed_read_is_no_miss(tmp_path: Path) -> None:
    faults = DiskFaults("preadv", "blocks", errno.EIO)
    tier = await opened(tmp_path, ops=faults.ops)
    await put(tier, {1: 0})
    with pytest.raises(TierFailed, match=r"read at .* failed: .*Input/output error"):
        await got(tier, 1, 0)
    faults.is_on = False
    assert tier.counts.as_dict()["is_failing"]
    assert await is_intact(tier, 1, 0)
    assert not tier.counts.as_dict()["is_failing"]
    await tier.aclose()


async def test_read_does_not_hide_a_failed_write(tmp_path: Path) -> None:
    faults = DiskFaults("pwritev", "blocks", errno.EIO, is_on=False)
    tier = await opened(tmp_path, ops=faults.ops)
    await put(tier, {1: 0})
    faults.is_on = True
    with pytest.raises(TierFailed):
        await put(tier, {2: 1})
    assert await is_intact(tier, 1, 0)
    assert tier.counts.as_dict()["is_failing"]
    faults.is_on = False
    await put(tier, {2: 1})
    assert not tier.counts.as_dict()["is_failing"]
    await tier.aclose()


async def test_read_of_a_disk_that_does_not_answer_fails_and_leaves_the_buffers(tmp_path: Path) -> None:
    disk = HungDisk()
    tier = await SsdTier.open([tmp_path], SIZE, BLOCK_BYTES, disk.ops, wait_s=0.1)
    await put(tier, {number: number for number in range(7)})
    buffers = [bytearray(BLOCK_BYTES) for _ in range(7)]
    answers: list[str] = []

    async def read(number: int) -> None:
        with pytest.raises(TierFailed) as failure:
            await tier.read([Block(number, key_of(number))], [memoryview(buffers[number])])
        answers.append(str(failure.value))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            for number in range(7):
                tasks.start_soon(read, number)
    assert len(answers) == 7
    assert all(f"read at {tmp_path} failed" in each and "no answer within 0.1 s" in each for each in answers)
    assert (tier.counts.errors, tier.counts.is_failing) == (7, True)
    assert disk.waiting == 4  # the others had not begun, and never will
    began = anyio.current_time()
    await read(0)
    assert anyio.current_time() - began < 0.1  # no thread is left, so it fails without a wait
    disk.go.set()
    await until(lambda: not disk.waiting)
    assert await is_intact(tier, 6, 6)  # the threads are free again
    assert not any(map(any, buffers))
    await tier.aclose()


async def test_reads_wait_longer_in_a_line_that_goes_on(tmp_path: Path) -> None:
    def slow(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if len(pieces[0]) > 40:  # not the index
            time.sleep(0.3)
        return os.preadv(fd, pieces, offset)

    tier = await SsdTier.open([tmp_path], SIZE, BLOCK_BYTES, FileOps(preadv=slow), wait_s=1.0)
    await put(tier, {number: number for number in range(SLOTS)})

    async def read(number: int) -> None:
        assert await is_intact(tier, number, number)

    async with anyio.create_task_group() as tasks:
        for number in range(SLOTS):
            tasks.start_soon(read, number)  # the last ones wait for 1.2 s
    await tier.aclose()


async def test_short_reads_and_writes_go_on_where_they_stopped(tmp_path: Path) -> None:
    def little(
        call: Callable[[int, Sequence[Buffer], int], int],
    ) -> Callable[[int, Sequence[Buffer], int], int]:
        return lambda fd, pieces, offset: call(fd, [memoryview(pieces[0])[:7]], offset)

    tier = await opened(tmp_path, ops=FileOps(pwritev=little(os.pwritev), preadv=little(os.preadv)))
    await put(tier, {1: 0, 2: 1})
    assert await is_intact(tier, 1, 0)
    assert await is_intact(tier, 2, 1)
    await tier.aclose()


async def test_a_write_that_makes_no_progress_fails(tmp_path: Path) -> None:
    await (await opened(tmp_path)).aclose()
    with pytest.raises(StartupError, match="a write stopped short"):
        await opened(tmp_path, ops=FileOps(pwritev=lambda fd, pieces, offset: 0))


# slow disks


async def test_writes_wait_for_a_slow_disk_and_are_refused_in_the_end(tmp_path: Path) -> None:
    disk = SlowDisk()
    tier = await SsdTier.open(
        [tmp_path], SIZE, BLOCK_BYTES, disk.ops, pending_bytes=3 * BLOCK_BYTES, wait_s=0.05
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, tier, {1: 0, 2: 1})
        await until(disk.began.is_set)
        with pytest.raises(TierBusy, match=r"no room for 400 bytes within 0\.05 s") as busy:
            await put(tier, {3: 2, 4: 3})
        assert (busy.value.required, busy.value.available, busy.value.waiting) == (400, 200, 0)
        assert isinstance(busy.value, TierFailed)
        disk.go.set()
    await put(tier, {3: 2, 4: 3})
    assert (tier.counts.waits, tier.counts.refused, tier.counts.pending_bytes) == (1, 1, 0)
    await tier.aclose()


async def test_writes_that_wait_are_let_in_in_order(tmp_path: Path) -> None:
    disk = SlowDisk()
    tier = await SsdTier.open(
        [tmp_path], SIZE, BLOCK_BYTES, disk.ops, pending_bytes=2 * BLOCK_BYTES, wait_s=HANG_S
    )
    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(put, tier, {number: number})
        await until(lambda: tier.counts.waits == 3)
        with anyio.move_on_after(0.01):
            await put(tier, {9: 9})
        disk.go.set()
    assert set(tier.recovered()) == {key_of(number) for number in range(5)}
    assert tier.counts.pending_bytes == 0
    await tier.aclose()


@pytest.mark.parametrize("native", [False, True])
async def test_a_cancelled_write_ends_when_its_thread_does(tmp_path: Path, native: bool) -> None:
    disk = SlowDisk()
    tier = await opened(tmp_path, ops=disk.ops)
    source = bytearray(content_of(1))
    ended = anyio.Event()

    async def write() -> None:
        try:
            await tier.write([Block(0, key_of(1))], [memoryview(source)])
        finally:
            ended.set()

    async def queued() -> None:
        await put(tier, {2: 1})

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        running: list[asyncio.Task[None]] = []

        async def cancelled() -> None:
            running.append(asyncio.current_task())  # type: ignore[arg-type]
            with scope:
                await write()

        tasks.start_soon(cancelled)
        await until(disk.began.is_set)
        with anyio.move_on_after(0.01) as soon:
            await queued()
        assert soon.cancelled_caught  # it had not begun
        for _ in range(2):
            running[0].cancel() if native else scope.cancel()
            await anyio.sleep(0.01)
        assert not ended.is_set()  # the thread still reads the source
        disk.go.set()
    assert ended.is_set()
    assert key_of(2) not in tier.recovered()
    await put(tier, {3: 0})
    assert await is_intact(tier, 3, 0)
    await tier.aclose()


async def test_concurrent_writes_share_a_wait_for_the_device(tmp_path: Path) -> None:
    disk = SlowDisk()
    syncs: list[int] = []

    def fdatasync(fd: int) -> None:
        syncs.append(fd)

    def pwritev(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC:
            syncs.append(fd)
        return disk.pwritev(fd, pieces, offset)

    tier = await opened(tmp_path, ops=FileOps(pwritev=pwritev, fdatasync=fdatasync))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(put, tier, {0: 0})
        await until(disk.began.is_set)
        before = len(syncs)
        for number in range(1, 12):
            tasks.start_soon(put, tier, {number: number})
        await until(lambda: tier.counts.pending_bytes == 12 * BLOCK_BYTES)
        disk.go.set()
    assert len(syncs) - before == 4  # two of the first write, two of all others
    await tier.aclose()


async def test_reads_and_writes_start_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has no more threads could refuse one after the caller's memory was given away."""
    tier = await opened(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    await put(tier, {1: 0, 2: 1})
    assert await is_intact(tier, 1, 0)
    tier.forget([Block(1, key_of(2))])
    monkeypatch.undo()
    await tier.aclose()


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("left", range(16))
async def test_start_without_enough_threads_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    await (await opened(*paths)).aclose()  # the thread of anyio has started
    before, start = set(threading.enumerate()), threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        (start if left >= 0 else refuse_to_start)(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(StartupError, match="cannot be made: can't start new thread; raise the limit of"):
        await opened(*paths)
    monkeypatch.undo()
    assert set(threading.enumerate()) == before
    await (await opened(*paths)).aclose()


@pytest.mark.parametrize("left", range(16))
async def test_start_without_enough_memory_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    await (await opened(*paths)).aclose()  # the thread of anyio has started
    threads, files, zeros = set(threading.enumerate()), os.listdir("/proc/self/fd"), np.zeros

    def some_zeros(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return zeros(*arguments)

    monkeypatch.setattr(np, "zeros", some_zeros)
    with pytest.raises(StartupError, match="cannot be made: out of memory; raise the limit of"):
        await opened(*paths)
    monkeypatch.undo()
    assert set(threading.enumerate()) == threads
    assert os.listdir("/proc/self/fd") == files
    await (await opened(*paths)).aclose()


async def test_write_that_cannot_start_in_one_directory_waits_for_the_others(tmp_path: Path) -> None:
    disk, ended = SlowDisk(), anyio.Event()
    tier = await opened(tmp_path / "a", tmp_path / "b", ops=disk.ops)
    tier._committers[1].close()

    async def write() -> None:
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            await put(tier, {1: 0, 2: 1})
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await until(disk.began.is_set)
        await anyio.sleep(0.01)
        assert not ended.is_set()  # a thread still reads a source
        disk.go.set()
    await tier.aclose()
