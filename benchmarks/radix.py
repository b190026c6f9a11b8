"""The radix cache: look-ups per second among more and more conversations, memory per token, retrievals per second.

    python -m benchmarks.radix

A *look-up* is the first step of a turn. It gets the text of a conversation, and finds the ids of this text that an
engine has seen. Three other operations are measured for comparison. *match alone* is the search, without joining the
ids. *memory alone* knows the places of the pieces: it compares the text and joins the ids, without a search. *first
generation* is the trie of this router's first generation. All four run on one core, in turn in every round. All times
are processor time.

*Memory* is the resident memory that a fresh process gains by recording conversations, per token, and the cache's own
count of this memory. *Retrievals* go to a router on a core of its own, from the other core.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from benchmarks import footprint, lookups, retrievals
from benchmarks.apart import Apart, apart
from benchmarks.histories import LONG, SHORT, TALK, Shape
from benchmarks.lookups import FIRST, MATCH, MEMORY, OURS
from benchmarks.options import Options, parse
from benchmarks.processes import LOAD_CORE, leave_cleanly, require
from benchmarks.report import Column, Report
from benchmarks.samples import Samples, save_tokenizer

#: Share of ``--seconds`` for each measurement of look-ups. It is small, since a look-up is short.
_SHARE = 1 / 16

_TALKS = "next turn of conversations, 8.9 kB in 11 segments"
_TURNS = "next turn of short ones, 0.6 kB in 3 segments"
_SIZES = {
    # The lists of the first generation would take 14 GB for 100,000 conversations. So its trie gets 10,000 at most.
    _TALKS: (TALK, (100, 512, 1_000, 4_096, 10_000, 100_000), 10_000),
    _TURNS: (SHORT, (100, 1_000, 10_000, 100_000), 100_000),
}
_TINY_SIZES = (10,)
_ALONE = "nothing else to be found"
_MEMORY = "memory, bytes per token"
#: Tokens in all conversations together. They take hundreds of megabytes, so free memory of the heap matters little.
_TOKENS = 16_000_000
_RETRIEVALS = "retrievals of 2,000 tokens"

_RATES = (Column(OURS, OURS), Column(MATCH, MATCH), Column(MEMORY, MEMORY), Column(FIRST, FIRST))
_RATIO = Column("ratio", "radix_cache / first", 1)
_GROWTH = (
    Column("slower", "slower than at 100", 1),
    Column("memory slower", "memory alone", 1),
)
_EDGES = Column("edges", "edges", 1)
_MEMORY_COLUMNS = (
    Column("resident", "resident", 1),
    Column("counted", "counted", 1),
    Column("counted_percent", "counted %", 1),
)
_RETRIEVAL_COLUMNS = (
    Column("requests_per_s", "req/s"),
    Column("cpu_us", "us CPU"),
    Column("per_core", "req/s of a whole core"),
    Column("p50_ms", "p50 ms", 1),
    Column("p99_ms", "p99 ms", 1),
    Column("proxy_core", "proxy core %"),
    Column("load_core", "load core %"),
    Column("exact", "exact %"),
    Column("errors", "errors"),
)
_T = TypeVar("_T")


async def main(options: Options) -> int:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name) / "tokenizer"
        samples = Samples(save_tokenizer(directory, options.vocabulary))
        tokenizer = directory / "tokenizer.json"
        with apart(options) as run:
            _alone(options, report, run, tokenizer)
            for scenario in _SIZES:
                _growing(options, report, run, scenario, tokenizer)
            _memory(options, report, run, tokenizer)
        if options.wants(_RETRIEVALS):
            await retrievals.measure(options, report, _RETRIEVALS, directory, samples)
            report.show(_RETRIEVALS, _RETRIEVAL_COLUMNS)
    return report.finish(options)


def _each(scenario: str, rows: Mapping[str, _T]) -> Iterator[tuple[str, _T]]:
    """Yield ``rows``. Prints a line of progress before each."""
    for number, (name, row) in enumerate(rows.items(), 1):
        print(f"{scenario}: {number} of {len(rows)}: {name}", file=sys.stderr)
        yield name, row


def _alone(options: Options, report: Report, run: Apart, tokenizer: Path) -> None:
    if not options.wants(_ALONE):
        return
    seconds = options.seconds * _SHARE
    rows: dict[str, Callable[[], list[dict[str, float]]]] = {
        "one short key": lambda: run(lookups.measure_toy, options.rounds, seconds),
        "one conversation": lambda: run(
            lookups.measure, tokenizer, TALK, 1, options.rounds, seconds, first_generation=True
        ),
    }
    for name, measure in _each(_ALONE, rows):
        for figures in measure():
            report.add(_ALONE, name, **figures, ratio=figures[OURS] / figures[FIRST])
        report.show_row(_ALONE, name, (*_RATES, _RATIO, _EDGES))


def _growing(options: Options, report: Report, run: Apart, scenario: str, tokenizer: Path) -> None:
    if not options.wants(scenario):
        return
    shape, sizes, bearable = _SIZES[scenario]
    small: Sequence[dict[str, float]] = ()
    for name, size in _each(scenario, {f"{size:,}": size for size in options.pick(sizes, tiny=_TINY_SIZES)}):
        rounds = run(
            lookups.measure,
            *(tokenizer, shape, size, options.rounds, options.seconds * _SHARE),
            first_generation=size <= bearable,
        )
        small = small or rounds
        for figures, first in zip(rounds, small, strict=True):
            compared = {"ratio": figures[OURS] / figures[FIRST]} if FIRST in figures else {}
            report.add(
                scenario,
                name,
                **figures,
                **compared,
                **{
                    "slower": first[OURS] / figures[OURS],
                    "memory slower": first[MEMORY] / figures[MEMORY],
                },
            )
        report.show_row(scenario, name, (*_RATES, _RATIO, *_GROWTH, _EDGES))


def _memory(options: Options, report: Report, run: Apart, tokenizer: Path) -> None:
    if not options.wants(_MEMORY):
        return
    tokens = options.pick(_TOKENS, tiny=10_000)
    shapes: dict[str, Shape] = {"2,000 tokens in 10 segments": LONG, "93 tokens in 2": SHORT}
    rows = {}
    for name, shape in options.pick(list(shapes.items()), tiny=list(shapes.items())[-1:]):
        rows[f"{name}, float32"] = footprint.measure, shape, True
        rows[f"{name}, float64"] = footprint.measure, shape, False
        rows[f"{name}, {FIRST}"] = footprint.measure_first_generation, shape, True
    for name, (measure, shape, float32) in _each(_MEMORY, rows):
        report.add(_MEMORY, name, **run(measure, tokenizer, shape, tokens, float32=float32))
        report.show_row(_MEMORY, name, _MEMORY_COLUMNS)


if __name__ == "__main__":
    require("wrk", "setpriv", "taskset")
    leave_cleanly()
    given = parse(__doc__.partition("\n")[0])
    os.sched_setaffinity(0, {LOAD_CORE})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(given)))
