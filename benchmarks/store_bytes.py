"""The throughput of the tiers of a store, beside plain loops that copy, write and read the same bytes.

    python -m benchmarks.store_bytes [--only "1,024 KiB"] [--rounds N] [--directory DIR]

``memory copy``: blocks into a memory tier, beside slices of a bytearray. ``SSD write``: 64 MiB a call, each on the
disk when it returns, beside ``pwrite`` and one ``fdatasync`` for 64 MiB. ``cold read``: the same blocks, which the
page cache does not have, beside ``pread``. Tier and loop alternate, in preallocated files that were written before;
``of_plain`` is the median of the rounds' ratios. The directory must be on a disk.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter

from benchmarks.options import flags, read
from benchmarks.report import Column, Report
from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.memory import MemoryArena
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.tier import SsdTier

__all__ = ["main"]

_CALL_BYTES = 64 << 20
_PLAIN, _OURS = "plain loop", "tier"
_COLUMNS = (Column("gb_per_s", "GB/s", 2), Column("of_plain", "of plain", 2))


class _PlainFile:
    """A preallocated file of blocks, written and read by one call after the other."""

    def __init__(self, path: Path, block_bytes: int, capacity: int) -> None:
        self._block_bytes = block_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, block_bytes * capacity)

    def write(self, first: int, sources: Sequence[memoryview]) -> None:
        for number, source in enumerate(sources, first):
            os.pwrite(self._fd, source, number * self._block_bytes)
        os.fdatasync(self._fd)

    def read(self, first: int, into: Sequence[memoryview]) -> None:
        for number, target in enumerate(into, first):
            os.preadv(self._fd, [target], number * self._block_bytes)

    def close(self) -> None:
        os.close(self._fd)


def _key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


async def _gb_per_s(size: int, call: Callable[[], Awaitable[None]]) -> float:
    begun = perf_counter()
    await call()
    return size / (perf_counter() - begun) / 1e9


def _compare(report: Report, scenario: str, plain: float, ours: float) -> None:
    report.add(scenario, _PLAIN, gb_per_s=plain)
    report.add(scenario, _OURS, gb_per_s=ours, of_plain=ours / plain)


async def _measure_memory(report: Report, size: str, block_bytes: int, capacity: int, rounds: int) -> None:
    arena = MemoryArena(capacity, block_bytes)
    source = memoryview(bytearray(os.urandom(block_bytes)))
    target = memoryview(bytearray(block_bytes * capacity))

    async def ours() -> None:
        for number in range(capacity):
            arena.view(number)[:] = source

    async def plain() -> None:
        for begin in range(0, len(target), block_bytes):
            target[begin : begin + block_bytes] = source

    await ours()
    for _ in range(rounds):
        copied = block_bytes * capacity
        _compare(
            report, f"memory copy, {size}", await _gb_per_s(copied, plain), await _gb_per_s(copied, ours)
        )
    await arena.aclose()
    report.show(f"memory copy, {size}", _COLUMNS)


async def _measure_ssd(
    report: Report, directory: Path, size: str, block_bytes: int, capacity: int, rounds: int
) -> None:
    layout = Layout(block_bytes, capacity)
    tier = await SsdTier.open([directory / "tier"], layout.total_bytes, block_bytes)
    plain_file = _PlainFile(directory / "plain", block_bytes, capacity)
    at_once = min(capacity, max(1, _CALL_BYTES // block_bytes))
    calls = [range(first, min(first + at_once, capacity)) for first in range(0, capacity, at_once)]
    content = memoryview(bytearray(os.urandom(block_bytes * at_once)))
    buffers = [content[begin : begin + block_bytes] for begin in range(0, len(content), block_bytes)]
    space = bytearray(block_bytes * at_once)
    targets = [memoryview(space)[begin : begin + block_bytes] for begin in range(0, len(space), block_bytes)]

    async def write() -> None:
        for call in calls:
            await tier.write([Block(number, _key(number)) for number in call], buffers[: len(call)])

    async def plain_write() -> None:
        for call in calls:
            plain_file.write(call[0], buffers[: len(call)])

    async def read_all() -> None:
        for call in calls:
            await tier.read([Block(number, _key(number)) for number in call], targets[: len(call)])

    async def plain_read() -> None:
        for call in calls:
            plain_file.read(call[0], targets[: len(call)])

    total = block_bytes * capacity
    for number in range(rounds + 1):
        plain, ours = await _gb_per_s(total, plain_write), await _gb_per_s(total, write)
        if number:  # the first one writes to new extents
            _compare(report, f"SSD write, {size}", plain, ours)
        _forget_pages(directory / "plain")
        _forget_pages(directory / "tier" / "blocks")
        plain, ours = await _gb_per_s(total, plain_read), await _gb_per_s(total, read_all)
        if space[:block_bytes] != content[:block_bytes]:
            report.problem(f"{size}: other bytes were read than written")
        if number:
            _compare(report, f"cold read, {size}", plain, ours)
    plain_file.close()
    await tier.aclose()
    report.show(f"SSD write, {size}", _COLUMNS)
    report.show(f"cold read, {size}", _COLUMNS)


async def _measure(
    report: Report, parent: Path | None, total: int, rounds: int, sizes: Sequence[int]
) -> None:
    for block_bytes in sizes:
        size = f"{block_bytes >> 10:,} KiB"
        capacity = total // block_bytes
        await _measure_memory(report, size, block_bytes, capacity, rounds)
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            await _measure_ssd(report, Path(directory), size, block_bytes, capacity, rounds)


def main() -> int:
    parser = flags("Throughput of the tiers of a store, beside plain loops.")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="place on the disk (default: a temporary one)"
    )
    given = parser.parse_args()
    options = read(given)
    sizes = [size for size in (4 << 10, 64 << 10, 1 << 20) if options.wants(f"{size >> 10:,} KiB")]
    report = Report()
    total = options.pick(512 << 20, tiny=4 << 20)
    asyncio.run(_measure(report, given.directory, total, options.rounds, sizes))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
