"""Time from the death of an engine (SIGKILL or SIGSTOP) to its quarantine, with and without traffic."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import anyio
import httpx

from benchmarks.options import Options, parse
from benchmarks.processes import LOAD_CORE, Child, child, free_port, leave_cleanly
from benchmarks.report import Column, Report
from router_core import Worker
from router_core.cli import build
from router_core.router import Router
from slime_http.serving import serving

_FLAGS: dict[str, tuple[str, ...]] = {
    "default flags": (),
    "interval 1 s, timeout 2 s": ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"),
}
_TINY_FLAGS: dict[str, tuple[str, ...]] = {
    "interval 0.2 s, timeout 1 s": (
        *("--health-check-interval-secs", "0.2", "--health-check-timeout-secs", "1"),
    )
}
_DEATHS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_CLIENTS = 32
_QUESTION = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
_START_S, _VERDICT_S = 120.0, 180.0
_COLUMNS = (
    Column("fastest", "fastest s", 3),
    Column("median", "median s", 3),
    Column("slowest", "slowest s", 3),
    Column("failed", "failed requests"),
)


@dataclass(slots=True)
class _Load:
    """Clients that send requests without a pause, with counts of answered and failed requests."""

    answered: int = 0
    failed: int = 0

    async def ask(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None) as client:
            while True:
                answer = await client.post("/generate", json=_QUESTION)
                self.answered += answer.is_success
                self.failed += not answer.is_success


@asynccontextmanager
async def _fleet(
    flags: Sequence[str], count: int, directory: Path
) -> AsyncIterator[tuple[Router, str, list[tuple[Child, Worker]]]]:
    """Run a router in this process, in front of engines in other processes.

    Yields the router, its URL, and ``count`` engines. One more engine runs, so that one is left when these have died.
    """
    async with AsyncExitStack() as stack:
        router, app = build(flags)
        url = await stack.enter_async_context(serving(app, grace_s=1))
        engines = []
        for number in range(count + 1):
            address = ("--host", "127.0.0.1", "--port", str(port := free_port()))
            command = [sys.executable, "-m", "router_core", "engine", *address]
            engine = stack.enter_context(
                child(f"engine {number}", command, core=LOAD_CORE, directory=directory)
            )
            stack.callback(os.kill, engine.process.pid, signal.SIGCONT)  # a stopped process cannot end
            engines.append((engine, (await router.add_worker(f"http://127.0.0.1:{port}"))[0]))
        with anyio.fail_after(_START_S):
            while router.pool.healthy <= count:  # noqa: ASYNC110  # no event reports it
                await anyio.sleep(0.1)
        yield router, url, engines[1:]


async def _measure(flags: Sequence[str], rounds: int, clients: int) -> tuple[dict[str, list[float]], _Load]:
    """Return the seconds until the quarantine, by the kind of death, and the load. Engines die at random moments."""
    found: dict[str, list[float]] = {death: [] for death in _DEATHS}
    load = _Load()
    with tempfile.TemporaryDirectory() as directory:
        async with _fleet(flags, rounds * len(_DEATHS), Path(directory)) as (router, url, engines):
            interval_s: float = router.options.health_check_interval_secs

            async def die(engine: Child, worker: Worker, death: str) -> None:
                await anyio.sleep(random.uniform(0, interval_s))
                began = time.monotonic()
                os.kill(engine.process.pid, _DEATHS[death])
                with anyio.fail_after(_VERDICT_S):
                    while worker.state != "quarantined":  # noqa: ASYNC110  # to the millisecond
                        await anyio.sleep(0.001)
                found[death].append(time.monotonic() - began)

            async with anyio.create_task_group() as asking:
                for _ in range(clients):
                    asking.start_soon(load.ask, url)
                await anyio.sleep(interval_s)  # by then each engine has been probed
                async with anyio.create_task_group() as deaths:
                    for number, (engine, worker) in enumerate(engines):
                        deaths.start_soon(die, engine, worker, list(_DEATHS)[number % len(_DEATHS)])
                asking.cancel_scope.cancel()
    return found, load


async def _run(options: Options) -> int:
    report = Report()
    for name, flags in options.pick(_FLAGS, tiny=_TINY_FLAGS).items():
        if not options.wants(name):
            continue
        for traffic in options.pick((True, False), tiny=(True,)):
            clients = options.pick(_CLIENTS, tiny=2) if traffic else 0
            found, load = await _measure(flags, options.rounds, clients)
            for death, times in found.items():
                figures = {"fastest": min(times), "median": median(times), "slowest": max(times)}
                if traffic and not load.answered:
                    report.problem(f"{name}: {death}: nothing was answered")
                if traffic:
                    figures["failed"] = load.failed
                report.add(name, f"{death}, {'traffic' if traffic else 'idle'}", **figures)
        report.show(name, _COLUMNS)
    return report.finish(options)


def main() -> None:
    options = parse(__doc__ or "")  # for each round, one engine is killed and one is stopped
    leave_cleanly()
    logging.disable()  # else the router logs each death
    sys.exit(anyio.run(_run, options, backend_options={"use_uvloop": True}))


if __name__ == "__main__":
    main()
