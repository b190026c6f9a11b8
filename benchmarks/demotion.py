"""Conversations through routers whose memory has no room for them, compared with a router that has room for all.

    python -m benchmarks.demotion [--only SSD] [--rounds N] [--directory DIR]

All conversations are held at once, four turns each. At the end, a conversation has about 2,000 tokens. Then the
conversations are retrieved, one after the other, and compared with the engine's journal. The name of a row says what
``--radix-tree-max-bytes`` is. ``no memory`` is 1 byte: each turn is demoted as soon as it is answered. Without a lower
tier, what does not fit is evicted. So fewer turns find their history (``hit rate``), and fewer conversations are
``whole``. A whole conversation has the tokens of all turns as they were sampled. If a conversation is not whole, the
router must say that its tokens are not exact, or that its session is not ``complete``. With memory for all, an SSD or a
remote store (``file://``), all conversations must be whole. The store's own memory (``--store-memory-bytes``) has 4
MiB, or what the name of the row says. The column ``hits`` and the two after it have the shares of the blocks that reads
found in the store's memory, on the SSD and in the remote store. With an SSD in front of the remote store, the name of
the row has the size of the SSD, in percent of the blocks of all records.

The router runs on one core; the load and the embedded engine run on another.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import httpx
import uvloop
from tokenizers import Tokenizer

from benchmarks.crowd import Crowd, compare
from benchmarks.engine import save_engine_tokenizer, serving_engine
from benchmarks.options import Options, add_directory, flags, read
from benchmarks.peers import Running, router, started
from benchmarks.processes import LOAD_CORE, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body
from benchmarks.streams import quantile_us
from slime_tiered_store.cold_records import LAYOUT
from slime_tiered_store.tiers.ssd.directory import Layout as SsdLayout

__all__ = ["main"]

_SCENARIO = "conversations of 2,000 tokens"
_CONVERSATIONS = 128
_QUESTION_TOKENS = 1_600
_SETTLE_S = 60.0
_ALL, _HALF, _LITTLE, _NOTHING = 0, 2 << 20, 1 << 20, 1
_STORE_BYTES = 4 << 20
#: The store's memory in rows that compare SSDs in front of a remote store. It is so small that it has few hits.
_STORE_BEFORE_SSD_BYTES = 256 << 10
#: The blocks of all records of the conversations; see the last column.
_RECORD_BLOCKS = 1_282
_COLUMNS = (
    Column("turns_per_s", "turns/s"),
    Column("cpu_ms", "ms CPU a turn", 2),
    Column("p50_ms", "p50 ms"),
    Column("p99_ms", "p99 ms"),
    Column("memory_mb", "memory MB", 2),
    Column("demoted_per_s", "segments demoted/s"),
    Column("hit_rate", "hit rate %", 1),
    Column("reused", "tokens reused %", 1),
    Column("memory_hits", "hits: store's memory %", 1),
    Column("ssd_hits", "SSD %", 1),
    Column("remote_hits", "remote %", 1),
    Column("retrieval_p50_ms", "retrieval p50 ms", 1),
    Column("retrieval_p99_ms", "p99 ms", 1),
    Column("whole", "whole %", 1),
    Column("record_blocks", "blocks of all records"),
)


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


@dataclass(frozen=True, slots=True)
class _Tiers:
    """A router's memory for trajectories (0: no limit), the tier below it, and the memory of the store.

    ``ssd_percent``: the size of an SSD in front of the remote store, in percent of the blocks of all records.
    """

    memory_bytes: int
    lower: str = ""
    store_bytes: int = _STORE_BYTES
    ssd_percent: int = 0

    @property
    def name(self) -> str:
        sizes = {_ALL: "memory for all", _NOTHING: "no memory"}
        memory = sizes.get(self.memory_bytes, f"memory of {_size(self.memory_bytes)}")
        ssd = f" behind SSD of {self.ssd_percent} %" if self.ssd_percent else ""
        lower = f", {self.lower}{ssd}" if self.lower else ""
        store = f", store of {_size(self.store_bytes)}" if self.store_bytes != _STORE_BYTES else ""
        return memory + lower + store

    @property
    def keeps_all(self) -> bool:
        """True if nothing is evicted."""
        return bool(self.lower) or not self.memory_bytes

    def flags(self, directory: Path) -> tuple[str, ...]:
        """Return the flags of a router whose lower tier is in ``directory``."""
        memory = ("--radix-tree-max-bytes", str(self.memory_bytes))
        store = ("--plugin", "tiered_store", "--store-memory-bytes", str(self.store_bytes))
        if not self.lower:
            return memory
        if self.lower == "SSD":
            return (*memory, *store, *_ssd(directory, 256 << 20))
        (directory / "remote").mkdir()
        remote = ("--store-remote", f"file://{directory / 'remote'}")
        if not self.ssd_percent:
            return (*memory, *store, *remote)
        size = SsdLayout(LAYOUT.block_bytes, _RECORD_BLOCKS * self.ssd_percent // 100).total_bytes
        return (*memory, *store, *remote, *_ssd(directory / "ssd", size))


def _ssd(directory: Path, size_bytes: int) -> tuple[str, ...]:
    return "--store-ssd", str(directory), "--store-ssd-bytes", str(size_bytes)


_ROWS = (
    _Tiers(_ALL),
    *(_Tiers(size, lower) for size in (_HALF, _LITTLE) for lower in ("", "SSD", "remote")),
    *(_Tiers(_NOTHING, lower) for lower in ("SSD", "remote")),
    *(_Tiers(_NOTHING, "SSD", size) for size in (256 << 10, 1 << 20, 16 << 20)),
    *(_Tiers(_NOTHING, "remote", _STORE_BEFORE_SSD_BYTES, percent) for percent in (0, 12, 25, 50, 100)),
)
_TINY_ROWS = (_Tiers(_NOTHING, "remote", _STORE_BEFORE_SSD_BYTES, 12),)


async def _get(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer: dict[str, Any] = (await client.get(url)).raise_for_status().json()
        return answer


async def _settled(url: str, limit_bytes: int) -> dict[str, Any]:
    """Return ``/cache_stats`` once the trajectories in memory fit the limit. Raises TimeoutError after a minute."""
    with anyio.fail_after(_SETTLE_S):
        while (stats := await _get(f"{url}/cache_stats"))["bytes"] > limit_bytes > 0:  # noqa: ASYNC110  # no event reports it
            await anyio.sleep(0.01)
    return stats


async def _store_figures(url: str) -> dict[str, float]:
    """Return each tier's share of the blocks that reads found, in percent, and the number of blocks of all records."""
    shown = await _get(f"{url}/store")
    hits = {name: tier["hits"] for name, tier in shown["tiers"].items()}
    shares = {f"{name}_hits": count / max(1, sum(hits.values())) * 100 for name, count in hits.items()}
    return {**shares, "record_blocks": shown["record_blocks"]}


async def _is_flagged(url: str, session: str, reason: str) -> bool:
    """Return True if the router tells a client that tokens of the session are missing or not exact."""
    if reason.startswith("not exact: "):
        return True
    if reason.startswith("tokens "):  # other tokens than the engine consumed, without a flag
        return False
    return not (await _get(f"{url}/trajectories/{session}"))["complete"]


async def _measure(
    report: Report, tiers: _Tiers, crowd: Crowd, proxy: Running, worker: str, tokenizer: Tokenizer
) -> None:
    """Hold the conversations, wait until the trajectories in memory fit the limit, and retrieve the conversations."""
    cpu_s, began = proxy.cpu_s(), perf_counter()
    await crowd.converse()
    seconds, turns = perf_counter() - began, len(crowd.latencies_ns)
    stats = await _settled(proxy.url, tiers.memory_bytes)
    cpu_s, until_settled = proxy.cpu_s() - cpu_s, perf_counter() - began
    verdict, _ = await compare(crowd, worker, tokenizer, readers=1)
    for session, reason in verdict.wrong.items():
        if tiers.keeps_all or not await _is_flagged(proxy.url, session, reason):
            report.problem(f"{tiers.name}: {session}: {reason}")
    demotions = sum(stats["demoted"]["demotions"].values()) if "demoted" in stats else 0
    prompt_tokens = stats["tokens_reused"] + stats["tokens_encoded"] + stats["tokens_given"]
    report.add(
        _SCENARIO,
        tiers.name,
        errors=crowd.errors,
        turns_per_s=turns / seconds,
        cpu_ms=cpu_s / turns * 1e3,
        p50_ms=quantile_us(crowd.latencies_ns, 0.5) / 1e3,
        p99_ms=quantile_us(crowd.latencies_ns, 0.99) / 1e3,
        memory_mb=stats["bytes"] / 1e6,
        demoted_per_s=demotions / until_settled,
        hit_rate=stats["hit_rate"] * 100,
        reused=stats["tokens_reused"] / prompt_tokens * 100,
        retrieval_p50_ms=quantile_us(crowd.retrievals_ns, 0.5) / 1e3,
        retrieval_p99_ms=quantile_us(crowd.retrievals_ns, 0.99) / 1e3,
        whole=verdict.exact / verdict.trajectories * 100,
        **(await _store_figures(proxy.url) if tiers.lower else {}),
    )


async def _measure_row(options: Options, report: Report, tiers: _Tiers, parent: Path | None) -> None:
    """Run a new engine, and a new router with ``tiers``, and measure them."""
    conversations = options.pick(_CONVERSATIONS, tiny=4)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        tokenizer = save_engine_tokenizer(directory / "engine-tokenizer")
        (directory / "store").mkdir()
        worker = await stack.enter_async_context(
            serving_engine(directory, "--max-running-requests", str(conversations))
        )
        peer = router(
            "router", "--no-default-plugins", "--plugin", "radix_cache",
            *options.tokenizer(directory / "engine-tokenizer"), *tiers.flags(directory / "store"),
        )  # fmt: skip
        request = request_body("Are you there?", 1)
        [proxy] = await started(stack, [peer], worker, directory, request, lambda reply: reply.is_success)
        crowd = Crowd(proxy.url, Samples(tokenizer), conversations, question_tokens=_QUESTION_TOKENS)
        await _measure(report, tiers, crowd, proxy, worker, tokenizer)


async def _measure_all(options: Options, parent: Path | None) -> Report:
    report = Report()
    rows = [tiers for tiers in options.pick(_ROWS, tiny=_TINY_ROWS) if options.wants(tiers.name)]
    for round_ in range(options.rounds):
        for tiers in rows[:: -1 if round_ % 2 else 1]:
            await _measure_row(options, report, tiers, parent)
    report.show(_SCENARIO, _COLUMNS)
    return report


def main() -> int:
    require("setpriv", "taskset")
    leave_cleanly()
    parser = flags("Conversations through routers whose memory has no room for them.", rounds=3)
    add_directory(parser)
    given = parser.parse_args()
    options = read(given)
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure_all(options, given.directory)).finish(options)


if __name__ == "__main__":
    sys.exit(main())
