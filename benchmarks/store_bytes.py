"""The throughput of the tiers of a store, compared with plain loops that copy, write and read as many bytes.

    python -m benchmarks.store_bytes [--only "1,024 KiB"] [--rounds N] [--directory DIR]

``memory copy``: the tier copies rows into blocks in memory and writes the headers of the blocks, as a put does. A call
copies about 1 MiB; keys and checksums are computed before the measurement. The plain loop copies as many bytes into
slices of a bytearray, one slice for each block.

``SSD write``: a call writes 64 MiB. For blocks of records, which the radix cache puts into a store, calls of 1 MiB are
measured, too. A call returns when its bytes are on the disk. Before each call the tier forgets the blocks, as the store
does. The plain loop calls ``pwrite`` for each slot, and ``fdatasync`` once a call.

``cold read``: a call reads blocks that the page cache does not have. Calls of 1 MiB are also made in random order,
since sessions are retrieved in any order. The plain loop calls ``preadv`` for each slot.

A block and its header fill a slot. A slot for a block of records has 4 KiB. The plain loop moves whole slots through
the page cache, and the kernel reads ahead for the plain loop. Tier and loop alternate, in preallocated files that were
written before. ``of plain`` is the median of the rounds' ratios. The directory must be on a disk.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.options import add_directory, flags, read
from benchmarks.report import Column, Report
from slime_tiered_store.cold_records import LAYOUT as RECORD_LAYOUT
from slime_tiered_store.frames import Layout as BlockLayout
from slime_tiered_store.keys import Namespace, SequenceMeta
from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.block_header import HEADER_BYTES
from slime_tiered_store.tiers.memory import MemoryArena
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.tier import SsdTier

__all__ = ["main"]

_CALL_BYTES = 64 << 20
_RECORD_CALL_BYTES = 1 << 20  # the size of a record of routed experts
_SLOTS = (HEADER_BYTES + RECORD_LAYOUT.block_bytes, 64 << 10, 1 << 20)
_PLAIN, _OURS = "plain loop", "tier"
_COLUMNS = (
    Column("gb_per_s", "GB/s", 2),
    Column("of_plain", "of plain", 2),
    Column("cpu_s_per_gb", "s CPU a GB", 2),
)


class _PlainFile:
    """A preallocated file of slots, written and read by one call after the other."""

    def __init__(self, path: Path, slot_bytes: int, capacity: int) -> None:
        self._slot_bytes = slot_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, slot_bytes * capacity)

    def write(self, first: int, sources: Sequence[memoryview]) -> None:
        for number, source in enumerate(sources, first):
            os.pwrite(self._fd, source, number * self._slot_bytes)
        os.fdatasync(self._fd)

    def read(self, first: int, into: Sequence[memoryview]) -> None:
        for number, target in enumerate(into, first):
            os.preadv(self._fd, [target], number * self._slot_bytes)

    def close(self) -> None:
        os.close(self._fd)


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


async def _speed(size: int, call: Callable[[], Awaitable[None]]) -> dict[str, float]:
    cpu_s, begun = process_time(), perf_counter()
    await call()
    seconds, cpu_s = perf_counter() - begun, process_time() - cpu_s
    return {"gb_per_s": size / seconds / 1e9, "cpu_s_per_gb": cpu_s / size * 1e9}


def _compare(report: Report, scenario: str, plain: dict[str, float], ours: dict[str, float]) -> None:
    report.add(scenario, _PLAIN, **plain)
    report.add(scenario, _OURS, of_plain=ours["gb_per_s"] / plain["gb_per_s"], **ours)


async def _measure_memory(report: Report, size: str, block_bytes: int, capacity: int, rounds: int) -> None:
    arena = MemoryArena(capacity, block_bytes)
    layout = BlockLayout(1, block_bytes - BlockLayout(1, 1).rows_offset)
    at_once = max(_RECORD_CALL_BYTES // block_bytes, 1)
    source = memoryview(bytearray(os.urandom(block_bytes * at_once)))
    sources = layout.frames([source])
    target = memoryview(bytearray(block_bytes * capacity))
    rows = source[: layout.bytes_per_token * at_once]
    root_key = Namespace("benchmark").root_key(1, layout.bytes_per_token)
    sequence = SequenceMeta(root_key, range(at_once), 1)
    checksums = layout.checksums(rows)
    calls = range(0, capacity - at_once + 1, at_once)

    async def ours() -> None:
        for first in calls:
            layout.write(arena.stretches(range(first, first + at_once)), sequence, 0, checksums, rows)

    async def plain() -> None:
        begin = 0
        for _ in calls:
            for block in sources:
                target[begin : begin + block_bytes] = block
                begin += block_bytes

    await ours()
    for _ in range(rounds):
        copied = block_bytes * at_once * len(calls)
        _compare(report, f"memory copy, {size}", await _speed(copied, plain), await _speed(copied, ours))
    await arena.aclose()
    report.show(f"memory copy, {size}", _COLUMNS)


async def _measure_ssd(
    report: Report, directory: Path, size: str, slot_bytes: int, call_bytes: int, total: int, rounds: int
) -> None:
    block_bytes, capacity = slot_bytes - HEADER_BYTES, total // slot_bytes
    tier = await SsdTier.open([directory / "tier"], Layout(block_bytes, capacity).total_bytes, block_bytes)
    plain_file = _PlainFile(directory / "plain", slot_bytes, capacity)
    at_once = min(capacity, call_bytes // slot_bytes)
    places = [Block(number, number.to_bytes(16, "little")) for number in range(capacity)]
    calls = [places[first : first + at_once] for first in range(0, capacity, at_once)]
    content = memoryview(bytearray(os.urandom(slot_bytes * at_once)))
    slots = [content[begin : begin + slot_bytes] for begin in range(0, len(content), slot_bytes)]
    blocks = [slot[:block_bytes] for slot in slots]
    space = memoryview(bytearray(len(content)))
    read_slots = [space[begin : begin + slot_bytes] for begin in range(0, len(content), slot_bytes)]
    read_blocks = [slot[:block_bytes] for slot in read_slots]

    async def write() -> None:
        for call in calls:
            tier.forget(call)
            await tier.write(call, blocks[: len(call)])

    async def plain_write() -> None:
        for call in calls:
            plain_file.write(call[0].id, slots[: len(call)])

    async def read_all(order: Sequence[Sequence[Block]]) -> None:
        for call in order:
            await tier.read(call, read_blocks[: len(call)])

    async def plain_read(order: Sequence[Sequence[Block]]) -> None:
        for call in order:
            plain_file.read(call[0].id, read_slots[: len(call)])

    orders = {f"cold read, {size}": calls}
    if call_bytes == _RECORD_CALL_BYTES:
        orders[f"cold read in any order, {size}"] = random.Random(1).sample(calls, len(calls))

    for number in range(rounds + 1):
        plain, ours = await _speed(total, plain_write), await _speed(total, write)
        if number:  # the first round writes to new extents
            _compare(report, f"SSD write, {size}", plain, ours)
        for scenario, order in orders.items():
            _forget_pages(directory / "plain")
            _forget_pages(directory / "tier" / "blocks")
            plain = await _speed(total, partial(plain_read, order))
            ours = await _speed(total, partial(read_all, order))
            if read_blocks != blocks:
                report.problem(f"{scenario}: other bytes were read than written")
            if number:
                _compare(report, scenario, plain, ours)
    plain_file.close()
    await tier.aclose()
    for scenario in (f"SSD write, {size}", *orders):
        report.show(scenario, _COLUMNS)


async def _measure(
    report: Report, parent: Path | None, total: int, rounds: int, sizes: Sequence[tuple[int, str]]
) -> None:
    for slot_bytes, size in sizes:
        await _measure_memory(report, size, slot_bytes - HEADER_BYTES, total // slot_bytes, rounds)
        for call_bytes in (_CALL_BYTES, _RECORD_CALL_BYTES) if slot_bytes == _SLOTS[0] else (_CALL_BYTES,):
            name = f"{size}, {call_bytes >> 20} MiB a call"
            with tempfile.TemporaryDirectory(dir=parent) as directory:
                await _measure_ssd(report, Path(directory), name, slot_bytes, call_bytes, total, rounds)


def main() -> int:
    parser = flags("Throughput of the tiers of a store, beside plain loops.")
    add_directory(parser)
    given = parser.parse_args()
    options = read(given)
    named = [(size, f"{size >> 10:,} KiB") for size in _SLOTS]
    sizes = [(size, name) for size, name in named if options.wants(name)]
    report = Report()
    total = options.pick(512 << 20, tiny=4 << 20)
    asyncio.run(_measure(report, given.directory, total, options.rounds, sizes))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
