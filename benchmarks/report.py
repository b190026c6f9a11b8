"""Report of measurements: it keeps every sample, and shows medians and ratios."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import history
from benchmarks.options import Options
from benchmarks.peers import BASELINE

__all__ = ["EXACT", "Column", "Report"]

#: The share of exact answers in percent. A benchmark reports it only where all answers must be exact.
EXACT = "exact"

_ERRORS = ("errors", "faults", "failed")
#: Least widths of the columns of a table whose rows are printed one by one.
_NAME_WIDTH, _FIGURE_WIDTH = 46, 10
_RATES = ("requests_per_s", "chunks_per_s", "turns_per_s")


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the table: its name in the samples, its heading, its decimals.

    ``ratio`` adds a column with the figure divided by the baseline peer's. This column has the median of the rounds'
    ratios, not the ratio of the medians, since a shared machine drifts between rounds.
    """

    figure: str
    heading: str
    decimals: int = 0
    ratio: bool = False


@dataclass(slots=True)
class Report:
    """Samples by scenario and peer, in the order of their first appearance, and the problems of the run."""

    samples: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, scenario: str, peer: str, **figures: float) -> None:
        """Add one sample. Its errors, a rate of 0 and an ``exact`` share below 100 % are problems of the run."""
        self.samples.setdefault(scenario, {}).setdefault(peer, []).append(figures)
        for name in _ERRORS:
            if figures.get(name):
                self.problem(f"{scenario}: {peer}: {figures[name]:g} {name}")
        for name in _RATES:
            if figures.get(name) == 0:
                self.problem(f"{scenario}: {peer}: nothing was answered")
        if figures.get(EXACT, 100.0) != 100.0:
            self.problem(f"{scenario}: {peer}: {figures[EXACT]:.2f} % exact")

    def problem(self, text: str) -> None:
        """Note a fault that makes the figures worthless; :meth:`finish` prints it."""
        self.problems.append(text)

    def finish(self, options: Options) -> int:
        """Print the problems, write the files of ``--json`` and ``--history``, and return the exit code.

        The exit code is 1 if there are problems. A run with problems is not appended to the history.
        """
        if not self.samples:
            self.problem("nothing was measured")
        for text in self.problems:
            print(f"problem: {text}", file=sys.stderr)
        if options.json is not None:
            self.save(options.json)
        if options.history is not None and not self.problems:
            history.append(options.history, self.samples, machine(), baseline=BASELINE)
        return 1 if self.problems else 0

    def show(self, scenario: str, columns: Sequence[Column]) -> None:
        """Print the medians of one scenario as a table. A scenario without samples is left out."""
        if peers := self.samples.get(scenario):
            rows = [_headings(scenario, columns), *(self._cells(scenario, peer, columns) for peer in peers)]
            widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
            print()
            for row in rows:
                _print_row(row, widths)

    def show_row(self, scenario: str, peer: str, columns: Sequence[Column]) -> None:
        """Print the row of ``peer``, after its last sample. The headings come before a scenario's first row."""
        headings = _headings(scenario, columns)
        least = [_NAME_WIDTH, *[_FIGURE_WIDTH] * len(headings[1:])]
        widths = [max(len(heading), width) for heading, width in zip(headings, least, strict=True)]
        if peer == next(iter(self.samples[scenario])):
            print()
            _print_row(headings, widths)
        _print_row(self._cells(scenario, peer, columns), widths)

    def _cells(self, scenario: str, peer: str, columns: Sequence[Column]) -> list[str]:
        peers = self.samples[scenario]
        row = [peer]
        for column in columns:
            row.append(_text(_median(peers[peer], column.figure), column.decimals))
            if column.ratio:
                row.append(_text(self._ratio(peers[peer], peers.get(BASELINE, []), column.figure), 2))
        return row

    def save(self, path: Path) -> None:
        """Write the samples, the medians, the problems, the command and the facts about the machine, as JSON."""
        medians = {
            scenario: {
                peer: {figure: _median(samples, figure) for figure in samples[0]}
                for peer, samples in peers.items()
            }
            for scenario, peers in self.samples.items()
        }
        document: dict[str, object] = {"machine": machine(), "command": sys.argv, "medians": medians}
        document |= {"samples": self.samples, "problems": self.problems}
        path.write_text(json.dumps(document, indent=1) + "\n")

    @staticmethod
    def _ratio(
        samples: Sequence[dict[str, float]], baseline: Sequence[dict[str, float]], figure: str
    ) -> float | None:
        ratios = [
            ours[figure] / theirs[figure]
            for ours, theirs in zip(samples, baseline, strict=False)
            if figure in ours and theirs.get(figure)
        ]
        return median(ratios) if ratios else None


def machine() -> dict[str, object]:
    """Return the facts about the machine that a reader needs to judge the figures."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _headings(scenario: str, columns: Sequence[Column]) -> list[str]:
    headings = [scenario]
    for column in columns:
        headings += [column.heading, f"/ {BASELINE}"] if column.ratio else [column.heading]
    return headings


def _print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    first, *rest = (
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    print("  ".join([first, *rest]), flush=True)


def _median(samples: Sequence[dict[str, float]], figure: str) -> float | None:
    values = [sample[figure] for sample in samples if figure in sample]
    return median(values) if values else None


def _text(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
