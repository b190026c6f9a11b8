"""Runs of wrk, the load generator, and their figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import LOAD_CORE

__all__ = ["UNIQUE", "Figures", "run"]

#: A mark in the bodies. Each request has another text in its place.
UNIQUE = "@unique@"

_SCRIPT = Path(__file__).with_name("load.lua")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, as the client saw it. A bad status is 400 or above."""

    requests: int
    duration_us: int
    p50_us: int
    p99_us: int
    failed_connects: int
    failed_reads: int
    failed_writes: int
    bad_statuses: int
    timeouts: int

    def errors(self) -> dict[str, float]:
        """Return the number of errors of each kind, and ``errors``, their sum."""
        kinds = ("failed_connects", "failed_reads", "failed_writes", "bad_statuses", "timeouts")
        counts: dict[str, float] = {kind: getattr(self, kind) for kind in kinds}
        return {"errors": sum(counts.values()), **counts}


async def run(
    url: str,
    bodies: Path,
    *,
    connections: int,
    seconds: float,
    tag: str,
    path: str = "/generate",
    script: Path = _SCRIPT,
    headers: Sequence[str] = (),
    most_requests: int | None = None,
) -> Figures:
    """Load ``path`` of ``url`` with the bodies of a file (one per line) from one thread on the load's core.

    ``headers``: each as in ``Accept: a/b``. ``tag``: the beginning of each text that replaces ``UNIQUE``. After
    ``most_requests`` answers, wrk idles until ``seconds`` have passed. If wrk fails, RuntimeError with its output is
    raised.
    """
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "TERM", "taskset", "-c", str(LOAD_CORE)),
        *("wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"),
        *(part for header in headers for part in ("-H", header)),
        *("-s", str(script), f"{url}{path}", "--", str(bodies), tag),
        *([] if most_requests is None else [str(most_requests)]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    text = output.decode(errors="replace")
    if process.returncode != 0 or "\n@" not in text:
        raise RuntimeError(f"wrk ended with {process.returncode}: {text.strip()}")
    return Figures(**json.loads(text.rpartition("\n@")[2]))
