"""Time from a client's hang-up until the engine is idle, through the router and through the gateway."""

from __future__ import annotations

import logging
import socket
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import orjson

from benchmarks.options import parse, present
from benchmarks.peers import BASELINE, Running, gateway, router, started
from benchmarks.processes import LOAD_CORE, child, free_port, leave_cleanly
from benchmarks.report import Column, Report

_SAMPLING = {"max_new_tokens": 4000, "ignore_eos": True}
_ASKED: dict[str, dict[str, Any]] = {
    "single": {"text": "Once"},
    "batch of 4": {"text": ["Once"] * 4},
    "stream": {"text": "Once", "stream": True},
}
_GENERATING_S, _DEADLINE_S = 0.5, 30.0
_COLUMNS = (Column("median", "median s", 3, ratio=True), Column("slowest", "slowest s", 3))


async def _running(engine: httpx.AsyncClient) -> int:
    [load] = (await engine.get("/v1/loads")).json()["loads"]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def _measure(
    proxy: Running, engine: httpx.AsyncClient, asked: dict[str, Any], count: int
) -> list[float]:
    """Return the seconds until the engine is idle, for ``count`` clients in turn; [] if it gets no request."""
    body = orjson.dumps({**asked, "sampling_params": _SAMPLING})
    head = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    port = urlsplit(proxy.url).port
    times = []
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head % len(body) + body)
            await anyio.sleep(_GENERATING_S)
            if not await _running(engine):
                told = client.recv(1 << 16).partition(b"\r\n\r\n")
                print(
                    f"{proxy.name} does not pass the request on: {told[0].splitlines()[0]!r} {told[2]!r}",
                    file=sys.stderr,
                )
                return []
        began = time.monotonic()
        with anyio.fail_after(_DEADLINE_S):
            while await _running(engine):  # noqa: ASYNC110  # no event reports it
                await anyio.sleep(0.001)
        times.append(time.monotonic() - began)
    return times


async def _run() -> int:
    options = parse(__doc__ or "")
    peers = present([router("router, default plugins"), gateway(options.gateway_python)], options)
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        command = [sys.executable, "-m", "benchmarks.late_engine", str(port)]
        url = f"http://127.0.0.1:{port}"
        with child("late engine", command, core=LOAD_CORE, directory=directory):
            async with httpx.AsyncClient(base_url=url, trust_env=False) as engine:
                with anyio.fail_after(_DEADLINE_S):
                    while True:
                        try:
                            await _running(engine)
                            break
                        except httpx.TransportError:
                            await anyio.sleep(0.1)
                async with AsyncExitStack() as stack:
                    short = orjson.dumps({"text": "Once", "sampling_params": {"max_new_tokens": 1}})
                    proxies = await started(
                        stack, peers, url, directory, short, lambda reply: reply.is_success
                    )
                    for proxy in proxies:
                        for shape, asked in _ASKED.items():
                            times = await _measure(proxy, engine, asked, options.rounds)
                            if not times and proxy.name != BASELINE:
                                report.problem(f"{shape}: {proxy.name} does not pass the request on")
                            if times:
                                report.add(shape, proxy.name, median=median(times), slowest=max(times))
    for shape in _ASKED:
        report.show(shape, _COLUMNS)
    return report.finish(options)


def main() -> None:
    leave_cleanly()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.exit(anyio.run(_run))


if __name__ == "__main__":
    main()
