"""The delay that a proxy adds to streams, and the time and memory that a 64 MiB answer costs it.

    python -m benchmarks.relay --gateway-python gateway/bin/python

*spread*, *steps*: 64 server-sent-event streams of cumulative chunks, 10,000 chunks a second in all. In *spread* chunks
leave evenly over time, in *steps* a chunk of every stream leaves at once. Each chunk contains the time at which it was
written. ``added`` is the delay less the delay without a proxy; ``first`` is the delay of the streams' first chunks.
*closed loop*: the next chunk of a stream leaves when the previous one has arrived, so the rate is the most that the
proxy can relay. *64 MiB answer*: downloads of one JSON answer. The memory is the proxy's resident memory before the
downloads, and its peak during them. At the end, the router with ``radix_cache`` must have recorded all answers, and the
tokens of the streamed answer must be exact.

The proxy has one core; the worker and the clients share the other, in one process.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from time import monotonic

import anyio
import httpx
import uvloop

from benchmarks.download import download
from benchmarks.options import Options, parse, present
from benchmarks.peers import Peer, Running, gateway, httpx_proxy, nginx_proxy, router, started
from benchmarks.processes import LOAD_CORE, PROXY_CORE, CoreClock, leave_cleanly, require
from benchmarks.recorded import check_all_recorded, check_exact
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.stand_in import Chunk, Fixed, StandIn, serving_stand_in
from benchmarks.streams import Pace, cumulative_chunks, in_steps, quantile_us, spread, streaming

_STREAMS = 64
_CHUNKS_PER_S = 10_000
_RECORDING = "router, radix_cache"
_PROMPT = "Once upon a time"
_TOKENS = 64
_LARGE_TOKENS = 32_768
_LARGE_BYTES = 64 << 20
_DOWNLOADS = 5
_SETTLING_S = 0.5

_LOADS: dict[str, Pace | None] = {
    f"spread, {_CHUNKS_PER_S:,} chunks/s": spread(_CHUNKS_PER_S),
    f"steps of {_STREAMS}, {_CHUNKS_PER_S:,} chunks/s": in_steps(_CHUNKS_PER_S),
    "closed loop": None,
}
_LARGE = f"{_LARGE_BYTES >> 20} MiB answer"

_PACED_COLUMNS = (
    Column("chunks_per_s", "chunks/s"),
    Column("p50_us", "p50 us"),
    Column("p99_us", "p99 us"),
    Column("first_us", "first p50 us"),
    Column("added_p50_us", "added p50 us"),
    Column("added_p99_us", "added p99 us"),
    Column("cpu_us", "us CPU", 1, ratio=True),
    Column("proxy_core", "proxy core %"),
    Column("load_core", "load core %"),
    Column("faults", "faults"),
)
_CLOSED_COLUMNS = (Column("chunks_per_s", "chunks/s", ratio=True), *_PACED_COLUMNS[1:4], *_PACED_COLUMNS[6:])
_LARGE_COLUMNS = (
    Column("ms", "ms", ratio=True),
    Column("gb_per_s", "GB/s", 2),
    Column("cpu_ms", "ms CPU"),
    Column("before_mb", "MB before"),
    Column("peak_mb", "MB at peak"),
    Column("grown_mb", "grown MB", 1),
)


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        tokenizer = save_tokenizer(directory / "tokenizer", options.vocabulary)
        samples, prompt_tokens = Samples(tokenizer), len(tokenizer.encode(_PROMPT).ids)
        answer = samples.answer(_TOKENS)
        text = samples.decode(answer.ids[:-1])  # without the end token
        chunks = cumulative_chunks(samples, answer, prompt_tokens)
        large = _large(samples, prompt_tokens, options.pick(_LARGE_BYTES, tiny=1 << 20))
        stand_in = StandIn({_LARGE_TOKENS: [Fixed(large)]}, chunks=chunks)
        request = request_body(_PROMPT, _LARGE_TOKENS)
        digest = hashlib.sha256(large).digest()

        def is_whole(reply: httpx.Response) -> bool:
            return reply.status_code == 200 and hashlib.sha256(reply.content).digest() == digest

        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(serving_stand_in(stand_in))
            proxies = await started(stack, _peers(options, directory), worker, directory, request, is_whole)
            for round_ in range(1, options.rounds + 1):
                await _round(
                    report, options, [Running("direct", worker), *proxies], stand_in, chunks, len(large)
                )
                print(f"round {round_} of {options.rounds} done", file=sys.stderr)
                proxies = proxies[1:] + proxies[:1]
            for ours in (proxy for proxy in proxies if proxy.name == _RECORDING):
                await check_all_recorded(report, ours.url)
                await check_exact(report, ours.url, _PROMPT + text, prompt_tokens, answer.ids[:-1])
    for scenario, pace in _LOADS.items():
        report.show(scenario, _PACED_COLUMNS if pace else _CLOSED_COLUMNS)
    report.show(_LARGE, _LARGE_COLUMNS)
    return report.finish(options)


def _peers(options: Options, directory: Path) -> Sequence[Peer]:
    recording = ("--plugin", "radix_cache", *options.tokenizer(directory / "tokenizer"))
    return present(
        [
            router("router, no plugins", "--no-default-plugins", tiny=False),
            router(_RECORDING, "--no-default-plugins", *recording),
            gateway(options.gateway_python),
            nginx_proxy(),
            httpx_proxy(),
        ],
        options,
    )


async def _round(
    report: Report,
    options: Options,
    targets: Sequence[Running],
    stand_in: StandIn,
    chunks: Sequence[Chunk],
    large_bytes: int,
) -> None:
    """Measure each target, the worker itself first, in each scenario."""
    for scenario, pace in _LOADS.items():
        direct: dict[str, float] = {}
        for target in targets:
            figures = await _stream(target, stand_in, chunks, pace, options)
            direct = direct or figures
            for figure in ("p50_us", "p99_us"):
                figures[f"added_{figure}"] = figures[figure] - direct[figure]
            report.add(scenario, target.name, **figures)
    for target in targets:
        report.add(_LARGE, target.name, **await _download(target, options, large_bytes))


async def _stream(
    target: Running, stand_in: StandIn, chunks: Sequence[Chunk], pace: Pace | None, options: Options
) -> dict[str, float]:
    streams = options.pick(_STREAMS, tiny=4)
    async with streaming(target.url, stand_in, chunks, streams=streams, pace=pace) as seen:
        await anyio.sleep(options.pick(_SETTLING_S, tiny=0.05))
        gc.collect()
        seen.clear()
        cores, cpu_s, started_s = CoreClock(), target.cpu_s(), monotonic()
        await anyio.sleep(options.seconds)
        elapsed_s, cpu_s, busy = monotonic() - started_s, target.cpu_s() - cpu_s, cores.busy()
        arrived = len(seen.delays_ns)
        return {
            "chunks_per_s": arrived / elapsed_s,
            "p50_us": quantile_us(seen.delays_ns, 0.5),
            "p99_us": quantile_us(seen.delays_ns, 0.99),
            "first_us": quantile_us(seen.first_ns, 0.5),
            "cpu_us": cpu_s / max(1, arrived) * 1e6,
            "proxy_core": busy[PROXY_CORE] * 100,
            "load_core": busy.get(LOAD_CORE, 1.0) * 100,
            "faults": float(seen.faults),
        }


async def _download(target: Running, options: Options, large_bytes: int) -> dict[str, float]:
    request = request_body(_PROMPT, _LARGE_TOKENS)
    downloads = options.pick(_DOWNLOADS, tiny=1)
    before = peak = 0
    if target.child:
        target.child.reset_peak_memory()
        before, _ = target.child.memory_bytes()
    cpu_s = target.cpu_s()
    times_s = []
    for _ in range(downloads):
        size, seconds = await download(target.url, request)
        if size != large_bytes:
            raise RuntimeError(f"{target.name} answered {size} bytes instead of {large_bytes}")
        times_s.append(seconds)
    cpu_s = target.cpu_s() - cpu_s
    if target.child:
        _, peak = target.child.memory_bytes()
    return {
        "ms": median(times_s) * 1e3,
        "gb_per_s": large_bytes / median(times_s) / 1e9,
        "cpu_ms": cpu_s / downloads * 1e3,
        "before_mb": before / 1e6,
        "peak_mb": peak / 1e6,
        "grown_mb": (peak - before) / 1e6,
    }


def _large(samples: Samples, prompt_tokens: int, size_bytes: int) -> bytes:
    """Return an answer of ``size_bytes``, nearly all of them routed experts."""
    payload = samples.answer(_TOKENS).payload("large", prompt_tokens)
    rest = size_bytes - len(json.dumps(payload)) - len(', "routed_experts": ""')
    experts = base64.b64encode(random.Random(1).randbytes(rest // 4 * 3)).decode()
    payload["meta_info"]["routed_experts"] = experts
    text = json.dumps(payload).encode()
    return text[:-1] + b" " * (size_bytes - len(text)) + text[-1:]


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0])
    os.sched_setaffinity(0, {LOAD_CORE})
    gc.disable()  # a collection here would be taken for a delay of the proxy
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
