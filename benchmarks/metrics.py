"""The processor time of a request that metrics, the request log and traces take.

    python -m benchmarks.metrics --rounds 24 --seconds 1

Routers with the default plugins get the same load in turn: the 720-byte requests of ``benchmarks.proxy``. The first one
has no plugin ``metrics``; each other one has one thing more, and the last one nothing more. The figures are medians of
the processor time of a request, and of its difference to that of the first router in the same round, with quartiles.
On a busy machine the quartiles are far apart: then the medians mean nothing, even if that of ``nothing`` is 0.
Work that a router does after a run, such as sending spans, counts too. The routers are started anew every six rounds,
since the places of a process in memory change its times by some percent. Nobody scrapes meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles

import uvloop

from benchmarks import nginx, wrk
from benchmarks.options import Options, parse
from benchmarks.peers import Peer, Running, router, started
from benchmarks.processes import LOAD_CORE, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.stand_in import FACTS, Template
from router_core.loader import DEFAULT_PLUGINS

_TABLE, _BARE = "bare, 64 connections", "without metrics"
_NONE = "--no-default-plugins"
_CONNECTIONS = 64
_REQUEST_BYTES = 720
_SAMPLED_TOKENS = 82
_ROUNDS_A_START = 6
#: All name their plugins: a named plugin has another place in the order than a default one.
_OTHERS = [part for name in DEFAULT_PLUGINS if name != "metrics" for part in ("--plugin", name)]
#: A router with less processor time than this in a hundredth of a second has no work left.
_IDLE_S = 0.0005


def _routers(options: Options, collector: str) -> Sequence[Peer]:
    found = [
        router("metrics", _NONE, *_OTHERS, "--plugin", "metrics"),
        router("request log", _NONE, *_OTHERS, "--access-log"),
        router("nothing", _NONE, *_OTHERS),
    ]
    if find_spec("opentelemetry.sdk") is not None:
        flags = ("--enable-trace", "--otlp-traces-endpoint", collector)
        found.insert(2, router("traces", _NONE, *_OTHERS, *flags))
    found = options.pick(found, tiny=found[2:3])
    return [router(_BARE, _NONE, *_OTHERS), *(each for each in found if options.wants(each.name))]


async def main(options: Options) -> int:
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "1000000"  # else spans are dropped at this rate
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        samples = Samples(save_tokenizer(directory / "tokenizer", options.vocabulary))
        text = samples.opening(100)
        while len(request := request_body(text, _SAMPLED_TOKENS)) > _REQUEST_BYTES:
            text = text[:-1]
        bodies = directory / "bodies.jsonl"
        bodies.write_bytes(request)
        answer = Template(samples.answer(_SAMPLED_TOKENS).payload).render(b"0", 100)
        port = free_port()
        worker = nginx.worker_command(port, answer, {**FACTS, "/v1/traces": b""}, directory)
        url = f"http://127.0.0.1:{port}"
        peers = _routers(options, url)
        with child("worker", worker, core=LOAD_CORE, directory=directory):
            for first in range(0, options.rounds, _ROUNDS_A_START):
                async with AsyncExitStack() as stack:
                    routers = await started(
                        stack, peers, url, directory, request, lambda reply: reply.is_success
                    )
                    if not options.tiny:
                        await _round(routers, bodies, options)  # to warm up
                    for number in range(first, min(first + _ROUNDS_A_START, options.rounds)):
                        turn = number % len(routers)
                        _add(report, await _round(routers[turn:] + routers[:turn], bodies, options))
    report.show(
        _TABLE, (Column("cpu_us", "us CPU", 2), Column("more_us", "more", 2), Column("share", "%", 1))
    )
    for name, rounds in report.samples[_TABLE].items():
        shares = [figures["share"] for figures in rounds if "share" in figures]
        if len(shares) >= _ROUNDS_A_START:
            low, _, high = quantiles(shares, n=4)
            print(f"{name}: half of the rounds between {low:.1f} and {high:.1f} %")
    return report.finish(options)


async def _round(routers: Sequence[Running], bodies: Path, options: Options) -> dict[str, float]:
    """Return the microseconds of processor time of a request, by the name of its router."""
    found = {}
    for one in routers:
        cpu_s = one.cpu_s()
        seen = await wrk.run(
            one.url,
            bodies,
            connections=_CONNECTIONS,
            seconds=options.seconds,
            tag="x",
            most_requests=options.most_requests,
        )
        before, now = 0.0, one.cpu_s()
        while now - before > _IDLE_S:
            await asyncio.sleep(0.01)
            before, now = now, one.cpu_s()
        found[one.name] = (now - cpu_s) / max(1, seen.requests) * 1e6
    return found


def _add(report: Report, cpu_us: dict[str, float]) -> None:
    bare_us = cpu_us[_BARE]
    report.add(_TABLE, _BARE, cpu_us=bare_us)
    for name, own_us in cpu_us.items():
        if name != _BARE:
            more_us = own_us - bare_us
            report.add(_TABLE, name, cpu_us=own_us, more_us=more_us, share=more_us / bare_us * 100)


if __name__ == "__main__":
    require("wrk", "setpriv", "taskset", "nginx")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0])
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
