"""The processor time that metrics, the request log and traces add to a request.

    python -m benchmarks.metrics --rounds 12 --seconds 4

All routers run at once, on one core. Each has the default plugins except ``metrics``. The first router and the last
one, ``nothing``, have only these plugins. Each router between them has one thing more: ``metrics``, the request log, or
traces.

The load is the 720-byte request of ``benchmarks.proxy``. In each turn, every router gets a slice of 2,048 requests,
always in the same order. So at the beginning of each slice, the processor's caches have the data of another router. The
time of a slice is the processor time of the router's process until the router's next slice. So it includes what the
router does afterwards, such as sending spans. ``%`` is the additional time of a slice, as a share of the first router's
slice in the same turn.

A round starts all routers anew, since the places of a process in memory change its times by some percent. The figures
of a round are medians of its turns, and the table has their medians over the rounds. Below it are the confidence
intervals of the medians of ``%``. Other work on the machine makes the intervals wider, and should not shift them. The
row ``nothing`` shows the error that is left. Nobody scrapes the metrics meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

import uvloop

from benchmarks import nginx
from benchmarks.options import Options, parse
from benchmarks.peers import Peer, Running, router, started
from benchmarks.processes import LOAD_CORE, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.slices import Load, interval
from benchmarks.stand_in import FACTS, Template
from slime_start.default_plugins import DEFAULT_PLUGINS

_TABLE, _BARE = "bare, 64 connections", "without metrics"
_NONE = "--no-default-plugins"
_CONNECTIONS = 64
_REQUEST_BYTES = 720
_SAMPLED_TOKENS = 82
#: Requests of a slice: so many that the caches are warm for most of them.
_SLICE = 2048
_WARM_UP = 4
#: All routers name all their plugins: a plugin named beside the default plugins would have another place in the order.
_OTHERS = [part for name in DEFAULT_PLUGINS if name != "metrics" for part in ("--plugin", name)]


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
    found = [router(_BARE, _NONE, *_OTHERS), *(each for each in found if options.wants(each.name))]
    return [_in_equal_places(each) for each in found]


def _in_equal_places(peer: Peer) -> Peer:
    """Return ``peer`` without address space randomisation, so that its memory has the layout of other peers."""
    return replace(peer, command=lambda *given: ["setarch", "-R", *peer.command(*given)])


async def main(options: Options) -> int:
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "1000000"  # else spans are dropped at this rate
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        samples = Samples(save_tokenizer(directory / "tokenizer", options.vocabulary))
        text = samples.opening(100)
        while len(request := request_body(text, _SAMPLED_TOKENS)) > _REQUEST_BYTES:
            text = text[:-1]
        answer = Template(samples.answer(_SAMPLED_TOKENS).payload).render(b"0", 100)
        port = free_port()
        worker = nginx.worker_command(port, answer, {**FACTS, "/v1/traces": b""}, directory)
        url = f"http://127.0.0.1:{port}"
        peers = _routers(options, url)
        with child("worker", worker, core=LOAD_CORE, directory=directory):
            for number in range(options.rounds):
                os.environ["PYTHONHASHSEED"] = str(number + 1)
                async with AsyncExitStack() as stack:
                    routers = await started(
                        stack, peers, url, directory, request, lambda reply: reply.is_success
                    )
                    _add(report, await _round(routers, request, options))
    report.show(
        _TABLE, (Column("cpu_us", "us CPU", 2), Column("more_us", "more", 2), Column("share", "%", 2))
    )
    for name, rounds in report.samples[_TABLE].items():
        if name != _BARE:
            low, high, coverage = interval([figures["share"] for figures in rounds])
            print(f"{name}: {low:.2f} to {high:.2f} % with {coverage:.1%} confidence, {len(rounds)} rounds")
    return report.finish(options)


async def _round(routers: Sequence[Running], request: bytes, options: Options) -> dict[str, list[float]]:
    """Return the processor time of a request in microseconds, for each turn, by the name of the router."""
    requests = options.pick(_SLICE, tiny=_CONNECTIONS)
    with _loads(routers, request) as loads:
        for load in loads.values():
            await load.run(requests * options.pick(_WARM_UP, tiny=1))
        marks: dict[str, list[float]] = {one.name: [] for one in routers}
        until = time.monotonic() + options.seconds * len(routers)
        turn = 0
        while turn < 2 or time.monotonic() < until:
            for one in routers:
                marks[one.name].append(one.cpu_s())
                await loads[one.name].run(requests)
            turn += 1
        await asyncio.sleep(0.2)  # for the last work of the last slices
        for one in routers:
            marks[one.name].append(one.cpu_s())
    return {
        name: [(after - before) / requests * 1e6 for before, after in pairwise(found)]
        for name, found in marks.items()
    }


@contextmanager
def _loads(routers: Sequence[Running], request: bytes) -> Iterator[dict[str, Load]]:
    found = {one.name: Load(one.url, request, _CONNECTIONS) for one in routers}
    try:
        yield found
    finally:
        for load in found.values():
            load.close()


def _add(report: Report, cpu_us: dict[str, list[float]]) -> None:
    """Add a round: medians of the turns, and of their differences to the first router."""
    bare_us = cpu_us[_BARE]
    report.add(_TABLE, _BARE, cpu_us=median(bare_us))
    for name, own_us in cpu_us.items():
        if name != _BARE:
            pairs = [*zip(own_us, bare_us, strict=True)]
            report.add(
                _TABLE, name, cpu_us=median(own_us), more_us=median(own - bare for own, bare in pairs),
                share=median((own / bare - 1) * 100 for own, bare in pairs),
            )  # fmt: skip


if __name__ == "__main__":
    require("setpriv", "taskset", "setarch", "nginx")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0], rounds=12)
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
