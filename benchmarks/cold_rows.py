"""Routed experts of one sample, read from memory and from a store of blocks on disk.

    python -m benchmarks.cold_rows [--only "60 MB"] [--rounds N] [--directory DIR]

Each row has 94 layers with 8 experts, a byte each. ``store's memory``: the store's memory has all blocks. ``SSD``: the
store's memory has room for 4 MiB only, so all blocks are read from the files on the disk, which are not in the page
cache. ``grown``: the peak of resident memory (``VmHWM``) less the memory before. ``MB`` of it are the returned array.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import anyio
import anyio.lowlevel
import numpy as np

from benchmarks.options import Options, flags, read
from benchmarks.report import EXACT, Column, Report
from slime_r3.recorded_rows import RecordedRows
from slime_radix_cache.contracts import ConsumedTurn
from slime_sglang.token_arrays import TokenArray
from slime_tiered_store.cold_records import LAYOUT, ColdRecords
from slime_tiered_store.store import TieredStore
from slime_tiered_store.tiers.memory import MemoryArena
from slime_tiered_store.tiers.ssd.tier import SsdTier

__all__ = ["main"]

_NAME = "routed_experts"
_SHAPE = (94, 8)
_ROW_BYTES = _SHAPE[0] * _SHAPE[1]
#: By peer, the bytes of the store's memory; 0: there is no store.
_PEERS = {"memory": 0, "store's memory": 256 << 20, "SSD": 4 << 20}
_COLUMNS = (
    Column("mb", "MB", 1),
    Column("ms", "ms", 1),
    Column("grown_mb", "grown MB", 1),
    Column(EXACT, "exact %"),
)


@asynccontextmanager
async def _rows(memory_bytes: int, directory: Path) -> AsyncIterator[RecordedRows]:
    """Recorded rows; with ``memory_bytes``, all of them are moved to a store in ``directory``."""
    rows = RecordedRows(_NAME, 1 if memory_bytes else 0, lambda: _SHAPE)
    if not memory_bytes:
        yield rows
        return
    arena = MemoryArena(memory_bytes // LAYOUT.block_bytes, LAYOUT.block_bytes)
    disk = await SsdTier.open([directory], 256 << 20, LAYOUT.block_bytes)
    records = ColdRecords(wait_s=60.0, stops_on_loss=True)
    async with TieredStore(LAYOUT, arena, disk) as store:
        with records.kept_in(store, [arena, disk]):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rows.cold.run, records)
                yield rows
                tasks.cancel_scope.cancel()
    await disk.aclose()
    await arena.aclose()


async def _measure(report: Report, scenario: str, peer: str, tokens: int, rounds: int, parent: Path) -> None:
    told = np.random.default_rng(1).integers(0, 128, (tokens - 1) * _ROW_BYTES, np.uint8)
    turn = ConsumedTurn(
        "response", "prompt", tokens // 2, tokens - tokens // 2, tokens, (("1", tokens),), None
    )
    with tempfile.TemporaryDirectory(dir=parent) as name:
        async with _rows(_PEERS[peer], Path(name)) as rows:
            await anyio.lowlevel.checkpoint()  # the task that moves rows begins
            rows.record([turn], {_NAME: TokenArray.of(told)}, 0)
            while peer != "memory" and rows.turns.size_bytes:  # noqa: ASYNC110  # nothing tells that rows have left
                await anyio.sleep(0.01)
            for _ in range(rounds):
                if peer == "SSD":
                    _forget_pages(Path(name) / "blocks")
                before = _reset_peak()
                begun = perf_counter()
                found = rows.find([turn], tokens)
                values = found if isinstance(found, str) else await found.read()
                ms, grown = (perf_counter() - begun) * 1e3, _peak() - before
                exact = not isinstance(values, str) and np.array_equal(values.reshape(-1), told)
                report.add(
                    scenario,
                    peer,
                    mb=told.nbytes / 1e6,
                    ms=ms,
                    grown_mb=grown / 1e6,
                    **{EXACT: 100.0 * exact},
                )
                del values


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _reset_peak() -> int:
    """Give free memory back, reset the kernel's peak of resident memory (proc(5), clear_refs) and return it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def _measure_all(report: Report, options: Options, parent: Path) -> None:
    sizes = {"2,048 tokens": 2_048, "60 MB": options.pick(60_000_000 // _ROW_BYTES, tiny=4_096)}
    for scenario, tokens in sizes.items():
        if options.wants(scenario):
            for peer in _PEERS:
                await _measure(report, scenario, peer, tokens, options.rounds, parent)
            report.show(scenario, _COLUMNS)


def main() -> int:
    parser = flags("Routed experts of one sample, read from memory and from a store.")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="place on the disk (default: a temporary one)"
    )
    given = parser.parse_args()
    options, report = read(given), Report()
    asyncio.run(_measure_all(report, options, given.directory))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
