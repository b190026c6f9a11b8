"""The share of a request's processor time that the plugin metrics takes.

    python -m benchmarks.metrics --rounds 20 --seconds 1

Two routers with the default plugins, one of them without ``metrics``, get the same load in turn: the 720-byte requests
of ``benchmarks.proxy``. The figures are medians: of the processor time of a request at each router, and of the
difference between two runs that follow each other, which other work on the machine changes least. Nobody scrapes
meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks import nginx, wrk
from benchmarks.options import Options, parse
from benchmarks.peers import router, started
from benchmarks.processes import LOAD_CORE, child, free_port, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, request_body, save_tokenizer
from benchmarks.stand_in import FACTS, Template
from router_core.loader import DEFAULT_PLUGINS

_TABLE, _WITH, _WITHOUT = "bare, 64 connections", "router, default plugins", "router, without metrics"
_NONE = "--no-default-plugins"
_CONNECTIONS = 64
_REQUEST_BYTES = 720
_SAMPLED_TOKENS = 82
#: Both name their plugins: a named plugin has another place in the order than a default one.
_OTHERS = [part for name in DEFAULT_PLUGINS if name != "metrics" for part in ("--plugin", name)]


async def main(options: Options) -> int:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        samples = Samples(save_tokenizer(directory / "tokenizer"))
        text = samples.opening(100)
        while len(request := request_body(text, _SAMPLED_TOKENS)) > _REQUEST_BYTES:
            text = text[:-1]
        bodies = directory / "bodies.jsonl"
        bodies.write_bytes(request)
        answer = Template(samples.answer(_SAMPLED_TOKENS).payload).render(b"0", 100)
        port = free_port()
        worker = nginx.worker_command(port, answer, FACTS, directory)
        peers = [router(_WITH, _NONE, *_OTHERS, "--plugin", "metrics"), router(_WITHOUT, _NONE, *_OTHERS)]
        async with AsyncExitStack() as stack:
            stack.enter_context(child("worker", worker, core=LOAD_CORE, directory=directory))
            routers = await started(
                stack, peers, f"http://127.0.0.1:{port}", directory, request, lambda reply: reply.is_success
            )
            report = Report()
            for round_ in range(options.rounds + 1):
                cpu_us = {}
                for one in routers if round_ % 2 else routers[::-1]:
                    cpu_s = one.cpu_s()
                    seen = await wrk.run(
                        one.url, bodies, connections=_CONNECTIONS, seconds=options.seconds, tag="x"
                    )
                    cpu_us[one.name] = (one.cpu_s() - cpu_s) / max(1, seen.requests) * 1e6
                if round_:  # the first one warms up
                    for name, own_us in cpu_us.items():
                        report.add(_TABLE, name, cpu_us=own_us)
                    more_us = cpu_us[_WITH] - cpu_us[_WITHOUT]
                    report.add(_TABLE, "metrics", cpu_us=more_us, share=more_us / cpu_us[_WITHOUT] * 100)
    report.show(_TABLE, (Column("cpu_us", "us CPU", 2), Column("share", "% of a request", 1)))
    return report.finish(options)


if __name__ == "__main__":
    require("wrk", "setpriv", "taskset", "nginx")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0])
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
