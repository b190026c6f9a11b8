"""Conversations of many turns through the radix cache: what it saves, whether it is exact, whether it stalls.

    python -m benchmarks.multi_turn

*turns*: the same prompts through a router with the radix cache and one without, one request at a time. *crowd*:
1,000 conversations at once, retrieved and held against the engine's journal. *stalls*: how late the router's
event loop is while prompts of 32k tokens are tokenised, recorded and retrieved beside many small streams.

The router has one core. The other has the load, and the embedded engine (in *stalls* a stand-in, with a larger
vocabulary).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.crowd import measure_crowd, show_crowd
from benchmarks.processes import LOAD_CORE, leave_cleanly, require
from benchmarks.report import Report
from benchmarks.stalls import measure_stalls, show_stalls
from benchmarks.turns import measure_turns, show_turns

_PARTS = ("turns", "crowd", "stalls")


@dataclass(frozen=True, slots=True)
class _Options:
    only: tuple[str, ...]
    seconds: float
    json: Path | None


def _parse() -> _Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=_PARTS, help="only this part; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="length of one measurement of stalls (default 10)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    given = parser.parse_args()
    return _Options(tuple(given.only or _PARTS), given.seconds, given.json)


async def main(options: _Options) -> None:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        if "turns" in options.only:
            await measure_turns(report, directory)
            show_turns(report)
        if "crowd" in options.only:
            await measure_crowd(report, directory)
            show_crowd(report)
        if "stalls" in options.only:
            await measure_stalls(report, directory, options.seconds)
            show_stalls(report)
    if options.json:
        report.save(options.json)


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    given = _parse()
    os.sched_setaffinity(0, {LOAD_CORE})
    gc.disable()  # a collection here would be taken for a delay of the router
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(given))
