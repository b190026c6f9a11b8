"""A report of measurements: every sample kept, medians and ratios shown."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.peers import BASELINE

__all__ = ["Column", "Report"]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the table: its name in the samples, its heading, its decimals.

    ``ratio`` adds a column with the figure over the baseline peer's; medians of the rounds' ratios, because
    peers alternate within a round and a shared machine drifts between rounds.
    """

    figure: str
    heading: str
    decimals: int = 0
    ratio: bool = False


@dataclass(slots=True)
class Report:
    """Samples by scenario and peer, in the order of their first appearance."""

    samples: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)

    def add(self, scenario: str, peer: str, **figures: float) -> None:
        self.samples.setdefault(scenario, {}).setdefault(peer, []).append(figures)

    def show(self, scenario: str, columns: Sequence[Column]) -> None:
        """Print the medians of one scenario as a table."""
        peers = self.samples.get(scenario)
        if not peers:
            return
        headings = [scenario]
        for column in columns:
            headings.append(column.heading)
            if column.ratio:
                headings.append(f"/ {BASELINE}")
        rows = [headings]
        for name, samples in peers.items():
            row = [name]
            for column in columns:
                row.append(_text(_median(samples, column.figure), column.decimals))
                if column.ratio:
                    row.append(_text(self._ratio(samples, peers.get(BASELINE, []), column.figure), 2))
            rows.append(row)
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        print()
        for row in rows:
            first, *rest = (
                cell.ljust(w) if not i else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join([first, *rest]))

    def save(self, path: Path) -> None:
        """Write every sample, and the machine they come from, as JSON."""
        medians = {
            scenario: {
                peer: {figure: _median(samples, figure) for figure in samples[0]}
                for peer, samples in peers.items()
            }
            for scenario, peers in self.samples.items()
        }
        document = {"machine": machine(), "command": sys.argv, "medians": medians, "samples": self.samples}
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
    """The facts a reader needs to judge the figures."""
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


def _median(samples: Sequence[dict[str, float]], figure: str) -> float | None:
    values = [sample[figure] for sample in samples if figure in sample]
    return median(values) if values else None


def _text(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
