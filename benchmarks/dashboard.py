"""The processor time that the dashboard takes for a data request of an open page, and for a sample of its plots.

The router has the default plugins, ``engine`` and ``radix_cache``. Its data route is called without a socket and
without middleware. One worker is the embedded engine. Each of the others counts as having answered ``/generate`` with
two statuses. The history of samples is full. The first data request of a page gets all of the history. A later request
gets only the samples that are new.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop
from starlette.applications import Starlette

from benchmarks.options import Options, parse
from benchmarks.report import Column, Report
from router_core import Worker
from router_core.router import Router
from router_core.types import ASGIApp
from slime_dashboard.overview import Overview
from slime_testing import started

_WORKERS = (8, 64, 1000)
_ROUNDS, _CALLS = 20, 50
_SAMPLES = 720
_NEXT, _FIRST = "a data request", "the first of a page"


async def _get(app: ASGIApp, query: bytes) -> int:
    """Send a data request to ``app``. Returns the size of the answer. Raises RuntimeError unless the status is 200."""
    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/ui/data/overview",
        "raw_path": b"/ui/data/overview", "query_string": query, "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 30000), "state": {},
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if sent[0]["status"] != 200:
        raise RuntimeError(f"the data request got {sent[0]['status']}: {sent[1]['body']!r}")
    return sum(len(message.get("body", b"")) for message in sent)


async def _cost_us(options: Options, call: Callable[[], Any]) -> float:
    """Return the mean processor time of a ``call`` in microseconds, in the fastest of some rounds."""
    best = float("inf")
    rounds, calls = options.pick((_ROUNDS, _CALLS), tiny=(1, 2))
    for _ in range(rounds):
        begun = time.process_time_ns()
        for _ in range(calls):
            found = call()
            if found is not None:
                await found
        best = min(best, (time.process_time_ns() - begun) / calls / 1000)
    return best


async def main(options: Options) -> int:
    report = Report()
    for workers in options.pick(_WORKERS, tiny=_WORKERS[:1]):
        table = f"{workers} workers"
        async with started("--plugin", "engine", "--plugin", "radix_cache") as running:
            await _measure(options, report, table, running.router, workers)
        report.show(table, (Column("cpu_us", "us CPU"), Column("size_kb", "kB", 1)))
    return report.finish(options)


async def _measure(options: Options, report: Report, table: str, router: Router, workers: int) -> None:
    overview = Overview(router)
    app = Starlette(routes=overview.routes("/ui/data"))
    counts = router.components.get("traffic").counts
    for number in range(workers - len(router.pool)):
        worker = router.pool.add(Worker(f"http://10.0.{number // 250}.{number % 250}:30000"))
        for status in (200, 503):
            series = counts.of("POST", "/generate", status, worker.url)
            for duration_s in (0.3, 1.2, 4.0):
                series.whole.observe(duration_s)
                series.to_first_byte.observe(duration_s / 9)
    overview.begin()
    for _ in range(options.pick(_SAMPLES, tiny=3)):
        await asyncio.sleep(1e-4)  # a sample needs some time since the last one
        overview.sample()
    for row, query in ((_NEXT, b"since=%f" % (time.time() + 3600)), (_FIRST, b"since=0")):
        cost_us = await _cost_us(options, partial(_get, app, query))
        report.add(table, row, cpu_us=cost_us, size_kb=await _get(app, query) / 1e3)
    report.add(table, "a sample", cpu_us=await _cost_us(options, overview.sample))


if __name__ == "__main__":
    given = parse(__doc__.partition("\n")[0])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
