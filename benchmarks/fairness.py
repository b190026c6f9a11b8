"""Waiting times of a client while another client sends large or expensive bodies, with the router and the gateway.

    python -m benchmarks.fairness --gateway-python gateway/bin/python

One client asks for a few tokens every two milliseconds over two keep-alive connections. Another client sends a
hostile body over and over. ``wait`` is the time from a request of the first client to its answer. When an answer is
late, the requests that were due meanwhile count as well, each with its own wait. ``direct`` is the wait without a
proxy: the time that the worker and the clients add. ``grown`` is the proxy's peak memory less its memory before the
first body, and ``x body`` is ``grown`` divided by the size of the body. The proxy is started anew for each body.
``strangers`` is the share of the proxy's core that other processes used.

The proxy has one core; the worker and both clients share the other.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import anyio
import uvloop

from benchmarks.hostile_bodies import BODIES, Body
from benchmarks.options import Options, parse, present
from benchmarks.peers import BASELINE, Peer, Running, gateway, router, started
from benchmarks.processes import LOAD_CORE, PROXY_CORE, CoreClock, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.streams import quantile_us
from benchmarks.two_clients import Hostile, patient

_QUESTION, _TOKENS = "Are you there?", 16
_SETTLING_S, _START_DEADLINE_S = 0.5, 30.0
_MULTIPLE_FROM = 100_000  # bytes; for a smaller body ``x body`` means nothing
_NOBODY, _DIRECT = "nobody else", "direct"
_SCENARIO = "beside one client"
_FAILED = (0, *range(500, 600))  # a hostile body may be refused, but must get an answer

_COLUMNS = (
    Column("p50_ms", "wait p50 ms", 2),
    Column("p99_ms", "p99 ms", 2),
    Column("p99_ratio", f"/ {BASELINE}", 1),
    Column("max_ms", "max ms", 1),
    Column("max_ratio", f"/ {BASELINE}", 1),
    Column("faults", "faults"),
    Column("body_mb", "body MB", 1),
    Column("answers", "answers"),
    Column("status", "status"),
    Column("answer_s", "answered in s", 2),
    Column("grown_mb", "grown MB"),
    Column("multiple", "x body", 1),
    Column("strangers", "strangers %"),
)


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        with _worker(options, directory) as worker:
            await _listening(worker)
            peers = _peers(options, directory)
            async with AsyncExitStack() as stack:
                kept: list[Running] = []
                if options.tiny:  # one proxy for all bodies
                    kept = await _started(stack, peers, worker, directory)
                for round_ in range(1, options.rounds + 1):
                    for body in [_NOBODY, *BODIES]:
                        await _beside(body, peers, kept, report, options, worker, directory)
                    print(f"round {round_} of {options.rounds} done", file=sys.stderr)
    report.show(_SCENARIO, _COLUMNS)
    return report.finish(options)


@contextmanager
def _worker(options: Options, directory: Path) -> Iterator[str]:
    """Run ``benchmarks.quick_worker``. ``directory`` gets its answers, and a tokenizer and a template for routers."""
    samples = Samples(tokenizer := save_tokenizer(directory / "tokenizer", options.vocabulary))
    template = files("slime_engine").joinpath("chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    answer = samples.answer(_TOKENS)
    message = {"role": "assistant", "content": answer.text}
    chat = {
        "id": "chat",
        "object": "chat.completion",
        "created": 946684800,
        "model": "stand-in",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    answers = {
        "generated.json": answer.payload("answer", len(tokenizer.encode(_QUESTION).ids)),
        "chat.json": chat,
    }
    for file, content in answers.items():
        (directory / file).write_text(json.dumps(content))
    command = [sys.executable, "-m", "benchmarks.quick_worker", str(port := free_port())]
    command += [str(directory / file) for file in answers]
    with child("worker", command, core=LOAD_CORE, directory=directory):
        yield f"http://127.0.0.1:{port}"


async def _listening(url: str) -> None:
    """Wait until a server listens at ``url``."""
    address = urlsplit(url)
    with anyio.fail_after(_START_DEADLINE_S):
        while True:
            try:
                stream = await anyio.connect_tcp(str(address.hostname), address.port or 80)
            except OSError:
                await anyio.sleep(0.1)
            else:
                return await stream.aclose()


def _peers(options: Options, directory: Path) -> Sequence[Peer]:
    template = str(directory / "chat_template.jinja")
    known = (*options.tokenizer(directory / "tokenizer"), "--chat-template", template)
    return present(
        [
            router("router, no plugins", "--no-default-plugins", tiny=False),
            router("router, default plugins", tiny=False),
            router("router, radix_cache + openai", "--plugin", "radix_cache", "--plugin", "openai", *known),
            gateway(options.gateway_python),
            _unpinned(gateway(options.gateway_python)),
        ],
        options,
        ignore_only=True,
    )


def _unpinned(peer: Peer) -> Peer:
    """Return ``peer``, which has several threads, with two cores instead of one. So its clients wait less."""

    def command(*given: Any) -> list[str]:
        return ["taskset", "-c", f"{PROXY_CORE},{LOAD_CORE}", *peer.command(*given)]

    return Peer(f"{peer.name}, both cores", command, peer.missing)


async def _beside(
    name: str,
    peers: Sequence[Peer],
    kept: Sequence[Running],
    report: Report,
    options: Options,
    worker: str,
    directory: Path,
) -> None:
    """Measure the worker itself, then every peer, with the body ``name``, if any. Proxies in ``kept`` run already."""

    def is_wanted(peer: str) -> bool:
        return options.wants(f"{name}, {peer}")

    wanted = [peer for peer in peers if is_wanted(peer.name)]
    body = (
        BODIES[name](options.pick(1, tiny=1000))
        if name in BODIES and (wanted or is_wanted(_DIRECT))
        else None
    )
    found: dict[str, dict[str, float]] = {}
    if is_wanted(_DIRECT):
        found[_DIRECT] = await _measure(Running(_DIRECT, worker), body, options)
    for peer in wanted:
        async with AsyncExitStack() as stack:
            proxies = [proxy for proxy in kept if proxy.name == peer.name]
            for proxy in proxies or await _started(stack, [peer], worker, directory):
                found[peer.name] = await _measure(proxy, body, options)
    for peer_name, figures in found.items():
        if BASELINE in found:
            for figure in ("p99", "max"):
                figures[f"{figure}_ratio"] = figures[f"{figure}_ms"] / found[BASELINE][f"{figure}_ms"]
        report.add(_SCENARIO, f"{name}, {peer_name}", **figures)
        if peer_name.startswith("router") and (
            figures["answered"] == 0 or figures.get("status", 200) in _FAILED
        ):
            report.problem(
                f"{name}, {peer_name}: the first client got {figures['answered']:g} answers, "
                f"the body got status {figures.get('status', 0):g} (0: none)"
            )
        print(f"{name}, {peer_name}: max {figures['max_ms']:.1f} ms", file=sys.stderr)


async def _started(
    stack: AsyncExitStack, peers: Sequence[Peer], worker: str, directory: Path
) -> list[Running]:
    request = request_body(_QUESTION, _TOKENS)
    return await started(stack, peers, worker, directory, request, lambda reply: reply.is_success)


async def _measure(target: Running, body: Body | None, options: Options) -> dict[str, float]:
    seconds, settling_s = options.pick((options.seconds, _SETTLING_S), tiny=(0.02, 0.01))
    async with patient(target.url, request_body(_QUESTION, _TOKENS)) as waits:
        await anyio.sleep(settling_s)
        gc.collect()
        before = 0
        if target.child:
            target.child.reset_peak_memory()
            before, _ = target.child.memory_bytes()
        waits.clear()
        cores, cpu_s, began = CoreClock(), target.cpu_s(), asyncio.get_running_loop().time()
        hostile = Hostile()
        if body is None:
            await anyio.sleep(seconds)
        else:
            await anyio.to_thread.run_sync(hostile.ask, target.url, *body, seconds)
        await anyio.sleep(settling_s)  # time for answers to requests that still wait
        with anyio.move_on_after(_START_DEADLINE_S):
            while not waits.waits_ns:  # noqa: ASYNC110  # no event reports it
                await anyio.sleep(settling_s)
    own = (target.cpu_s() - cpu_s) / (asyncio.get_running_loop().time() - began)
    figures = {
        "p50_ms": quantile_us(waits.waits_ns, 0.5) / 1e3,
        "p99_ms": quantile_us(waits.waits_ns, 0.99) / 1e3,
        "max_ms": max(waits.waits_ns, default=0) / 1e6,
        "faults": waits.faults,
        "answered": len(waits.waits_ns),
    }
    if target.child:
        _, peak = target.child.memory_bytes()
        figures["grown_mb"] = (peak - before) / 1e6
        figures["strangers"] = max(0.0, cores.busy()[PROXY_CORE] - own) * 100
    if body is not None:
        size = len(body[1])
        figures |= {
            "body_mb": size / 1e6,
            "answers": hostile.answers,
            "status": hostile.status,
            "answer_s": median(hostile.seconds),
        }
        if target.child and size >= _MULTIPLE_FROM:
            figures["multiple"] = (peak - before) / size
    return figures


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0], rounds=1)
    os.sched_setaffinity(0, {LOAD_CORE})
    gc.disable()  # a collection here would be taken for a wait
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
