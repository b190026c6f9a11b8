"""The copy of an SSD tier to a larger remote tier that was added later, compared with plain writers to the same store.

    python -m benchmarks.store_copies [--only redis] [--rounds N] [--directory DIR]

``file``: a directory on the same disk; each file and its directory entry are synced. ``redis``: a server with
``appendfsync always``. ``s3``: moto's server, which is one Python process and keeps objects in memory. The blocks have
the size of those in ``slime_tiered_store.cold_records``. A plain writer makes one call for each block, from memory.
There are as many plain writers as the tier makes calls at once. Plain writers and copy alternate, and ``of plain`` is
the median of the rounds' ratios. The directory must be on a disk.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from time import perf_counter, process_time
from urllib.request import Request, urlopen

from benchmarks.options import Options, add_directory, flags, read
from benchmarks.processes import LOAD_CORE, child, free_port
from benchmarks.report import Column, Report
from slime_tiered_store.cold_records import LAYOUT
from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.moving import Move
from slime_tiered_store.note_log import NoteLog
from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.block_header import HEADER_BYTES
from slime_tiered_store.tiers.remote import open_remote_tier
from slime_tiered_store.tiers.remote.client import RemoteClient
from slime_tiered_store.tiers.ssd.directory import Layout
from slime_tiered_store.tiers.ssd.tier import SsdTier

__all__ = ["main"]

_REDIS = which("redis-server") or which("valkey-server")
_START_S = 30.0
_COLUMNS = (
    Column("mb_per_s", "MB/s", 1),
    Column("of_plain", "of plain", 2),
    Column("cpu_s_per_gb", "s CPU a GB", 2),
)


@contextmanager
def _server(name: str, directory: Path, port: int, command: Sequence[str]) -> Iterator[None]:
    with child(name, command, core=LOAD_CORE, directory=directory) as server:
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if time.monotonic() > deadline:
                sys.exit(f"{name} does not listen: {server.last_words()}")
            time.sleep(0.02)
        yield


@contextmanager
def _file_store(directory: Path) -> Iterator[str]:
    (directory / "remote").mkdir()
    yield (directory / "remote").as_uri()


@contextmanager
def _redis_store(directory: Path) -> Iterator[str]:
    port = free_port()
    assert _REDIS is not None  # narrowing: without a server, ``redis`` is left out
    command = [_REDIS, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    with _server("redis", directory, port, [*command, "--appendonly", "yes", "--appendfsync", "always"]):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def _s3_store(directory: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with _server("s3", directory, port, command):
        endpoint = f"http://127.0.0.1:{port}"
        urlopen(Request(f"{endpoint}/bucket", method="PUT")).close()
        yield f"s3://bucket?endpoint={endpoint}&region=us-east-1"


_STORES = {"file": _file_store, "redis": _redis_store, "s3": _s3_store}
_MISSING = {
    "redis": "" if _REDIS and find_spec("redis") else "redis-server, or the package redis",
    "s3": "" if find_spec("moto") and find_spec("obstore") else "the package moto or obstore",
}


async def _write_plainly(client: RemoteClient, names: Sequence[str], content: bytes) -> None:
    rest = iter(names)

    async def write() -> None:
        for name in rest:
            await client.put({name: content})

    async with asyncio.TaskGroup() as tasks:
        for _ in range(client.calls_at_once):
            tasks.create_task(write())


async def _measure(report: Report, name: str, url: str, directory: Path, total: int, rounds: int) -> None:
    slot_bytes = HEADER_BYTES + LAYOUT.block_bytes
    content = os.urandom(slot_bytes)
    count = total // slot_bytes
    size = Layout(LAYOUT.block_bytes, count).total_bytes
    for number in range(rounds):
        keys = [os.urandom(16) for _ in range(count)]
        blocks = [Block(slot, key) for slot, key in enumerate(keys)]
        path = directory / f"ssd-{number}"
        tier = await SsdTier.open([path], size, LAYOUT.block_bytes)
        await tier.write(blocks, [memoryview(content)[: LAYOUT.block_bytes]] * count)
        await tier.aclose()
        tier = await SsdTier.open([path], size, LAYOUT.block_bytes)
        remote = await open_remote_tier(url, LAYOUT.block_bytes)
        log = NoteLog(remote.client, remote.call, flag="", is_shared=True)
        move = Move(CacheEngine(tier, 1), tier, remote, log, bytes(11))
        await move.begin([], b"")
        names = [f"{(hexed := os.urandom(16).hex())[:2]}/{hexed}" for _ in range(count)]
        figures = []
        for call in (partial(_write_plainly, remote.client, names, content), move.run):
            cpu_s, begun = process_time(), perf_counter()
            await call()
            seconds, cpu_s = perf_counter() - begun, process_time() - cpu_s
            figures.append({"mb_per_s": total / seconds / 1e6, "cpu_s_per_gb": cpu_s / total * 1e9})
        plain, ours = figures
        report.add(name, "plain writers", **plain)
        report.add(name, "copy", of_plain=ours["mb_per_s"] / plain["mb_per_s"], **ours)
        if await remote.holds(keys) < count:
            report.problem(f"{name}: not all blocks were copied")
        await remote.aclose()
        await tier.aclose()
    report.show(name, _COLUMNS)


def _measure_all(report: Report, options: Options, parent: Path | None) -> None:
    for name, store in _STORES.items():
        if not options.wants(name) or (options.tiny and name == "s3"):  # its server takes seconds to start
            continue
        if missing := _MISSING.get(name):
            print(f"left out: {name}: {missing} is not installed", file=sys.stderr)
            continue
        total = options.pick((2 if name == "s3" else 8) << 20, tiny=256 << 10)
        with tempfile.TemporaryDirectory(dir=parent) as directory, store(Path(directory)) as url:
            asyncio.run(_measure(report, name, url, Path(directory), total, options.rounds))


def main() -> int:
    parser = flags("Throughput of the copy to a larger remote tier, beside plain writers.")
    add_directory(parser)
    given = parser.parse_args()
    options, report = read(given), Report()
    _measure_all(report, options, given.directory)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
