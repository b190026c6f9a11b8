"""Conversations of many turns through the radix cache: tokens saved, exactness, and stalls of the event loop.

    python -m benchmarks.multi_turn

*turns*: the same prompts through a router with the radix cache and one without, one request at a time. *crowd*:
1,000 conversations at once, retrieved and compared with the engine's journal. *stalls*: the lateness of the router's
event loop while prompts of 32k tokens are tokenised, recorded and retrieved beside many small streams.

The routers run on one core; the load and the embedded engine run on another. In *stalls*, a stand-in with a larger
vocabulary takes the place of the engine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks.crowd import measure_crowd, show_crowd
from benchmarks.options import Options, parse
from benchmarks.processes import LOAD_CORE, leave_cleanly, require
from benchmarks.report import Report
from benchmarks.stalls import measure_stalls, show_stalls
from benchmarks.turns import measure_turns, show_turns


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        if options.wants("turns"):
            await measure_turns(options, report, directory)
            show_turns(report)
        if options.wants("crowd"):
            await measure_crowd(options, report, directory)
            show_crowd(report)
        if options.wants("stalls"):
            await measure_stalls(options, report, directory)
            show_stalls(report)
    return report.finish(options)


if __name__ == "__main__":
    require("setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0], rounds=1, seconds=10.0)
    os.sched_setaffinity(0, {LOAD_CORE})
    gc.disable()  # a collection here would be taken for a delay of the router
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
