"""The processor time that metrics, the request log and traces add to a request.

    python -m benchmarks.metrics --rounds 40 --seconds 3

Each measurement has four pairs of routers in one process, see ``benchmarks.several_routers``. Both routers of a pair
have the default plugins except ``metrics``. The second router has one thing more: ``metrics``, the request log, or
traces. In the row ``nothing`` it has nothing more, so this row shows the error of the measurement.

The load is the 720-byte request of ``benchmarks.proxy``. The routers get slices of 512 requests in random order, since
the time of a request changes by some percent within seconds on a shared machine. After some slices there is a pause. In
the pause the process does its background work, and what the second routers put off, such as sending spans. The time of
a router is the median of its slices. ``more`` is the mean difference of the two times of a pair, plus the processor
time of the pauses, for each request of a second router. ``%`` is ``more`` as a share of the mean time of the first
routers.

A round starts the process anew, since the places of two routers in memory change their times by some percent. Therefore
many short rounds are better than a few long ones. The table has medians over the rounds, and below it are the
confidence intervals of the medians of ``%``. Nobody scrapes the metrics meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

import uvloop

from benchmarks import nginx
from benchmarks.options import Options, parse
from benchmarks.peers import first_answer
from benchmarks.processes import LOAD_CORE, PROXY_CORE, Child, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.several_routers import command
from benchmarks.slices import Load, interval
from benchmarks.stand_in import FACTS, Template
from slime_start.default_plugins import DEFAULT_PLUGINS

_TABLE = "bare, 64 connections"
_CONNECTIONS = 64
_REQUEST_BYTES = 720
_SAMPLED_TOKENS = 82
#: Pairs of routers in a process.
_PAIRS = 4
#: Requests of a slice, and slices of each router between two pauses.
_SLICE, _SLICES = 512, 2
_WARM_UP = 2
#: Longer than the half second after which ``metrics`` counts the last requests.
_PAUSE_S = 0.6
#: All routers name all their plugins: a plugin named beside the default plugins would have another place in the order.
_OTHERS = ["--no-default-plugins"] + [
    part for name in DEFAULT_PLUGINS if name != "metrics" for part in ("--plugin", name)
]


def _candidates(options: Options, collector: str) -> dict[str, list[str]]:
    """Return the flags that only the second routers have, by the name of the row."""
    found = {
        "metrics": ["--plugin", "metrics"],
        "request log": ["--access-log"],
        "traces": ["--enable-trace", "--otlp-traces-endpoint", collector],
        "nothing": [],
    }
    if find_spec("opentelemetry.sdk") is None:
        del found["traces"]
    names = options.pick([*found], tiny=["metrics"])
    return {name: found[name] for name in names if options.wants(name)}


async def main(options: Options) -> int:
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "1000000"  # else spans are dropped at this rate
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # ms: spans are sent before a pause is over
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
        with child("worker", worker, core=LOAD_CORE, directory=directory):
            for number in range(options.rounds):
                os.environ["PYTHONHASHSEED"] = str(number + 1)
                for candidate, flags in _candidates(options, url).items():
                    ports = [str(free_port()) for _ in range(2 * _PAIRS)]
                    routers = [
                        [*_OTHERS, *more, "--worker-urls", url, "--port", port]
                        for more, port in zip(([], flags) * _PAIRS, ports, strict=True)
                    ]
                    with child("routers", command(routers), core=PROXY_CORE, directory=directory) as process:
                        urls = [f"http://127.0.0.1:{port}" for port in ports]
                        for each in urls:
                            fault = await first_answer(process, each, request, lambda reply: reply.is_success)
                            if fault is not None:
                                raise RuntimeError(f"{fault}\n{process.last_words()}")
                        bare_us, own_us, later_us = await _round(process, urls, request, options)
                    report.add(
                        _TABLE, candidate, bare_us=bare_us, more_us=own_us - bare_us + later_us,
                        later_us=later_us, share=((own_us + later_us) / bare_us - 1) * 100,
                    )  # fmt: skip
    report.show(
        _TABLE,
        (
            Column("bare_us", "without, us CPU", 2),
            Column("more_us", "more", 2),
            Column("later_us", "in pauses", 2),
            Column("share", "%", 2),
        ),
    )
    for name, rounds in report.samples[_TABLE].items():
        low, high, coverage = interval([figures["share"] for figures in rounds])
        print(f"{name}: {low:.2f} to {high:.2f} % with {coverage:.1%} confidence, {len(rounds)} rounds")
    return report.finish(options)


async def _round(
    process: Child, urls: Sequence[str], request: bytes, options: Options
) -> tuple[float, float, float]:
    """Return microseconds of processor time for a request: of first routers, of second ones, and in the pauses."""
    requests = options.pick(_SLICE, tiny=_CONNECTIONS)
    found: list[list[float]] = [[] for _ in urls]
    later_s: list[float] = []
    order = [*range(len(urls))] * _SLICES
    with _loads(urls, request) as loads:
        for load in loads:
            await load.run(requests * options.pick(_WARM_UP, tiny=1))
        until = time.monotonic() + options.seconds
        while not later_s or time.monotonic() < until:
            random.shuffle(order)
            for number in order:
                before_s = process.cpu_s()
                await loads[number].run(requests)
                found[number].append(process.cpu_s() - before_s)
            before_s = process.cpu_s()
            await asyncio.sleep(_PAUSE_S)
            later_s.append(process.cpu_s() - before_s)
    bare_s, own_s = (fmean(median(each) for each in found[kind::2]) for kind in (0, 1))
    later_s_each = median(later_s) / (_PAIRS * _SLICES)
    return bare_s / requests * 1e6, own_s / requests * 1e6, later_s_each / requests * 1e6


@contextmanager
def _loads(urls: Sequence[str], request: bytes) -> Iterator[list[Load]]:
    found = [Load(url, request, _CONNECTIONS) for url in urls]
    try:
        yield found
    finally:
        for load in found:
            load.close()


if __name__ == "__main__":
    require("setpriv", "taskset", "nginx")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0], rounds=40, seconds=3)
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
