"""Plot of the history, as an SVG: requests that a core answers, divided by the gateway's, by commit.

A point is the gateway's processor time of a request divided by the router's: other work on the cores hardly changes
this ratio. On cores without other work it nearly equals the router's requests per second divided by the gateway's.

    python -m benchmarks.plot_history
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.history import DEFAULT

_SVG = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.svg"
#: Benchmark whose rows are drawn, and the goals of its peers.
_BENCHMARK = "proxy"
_GOALS = {"router, default plugins": 1.6, "router, radix_cache": 0.45}
_COLOURS = ("#3b82f6", "#f97316", "#22a06b", "#d946ef", "#ca8a04", "#06b6d4", "#ef4444", "#8b5cf6")
_LEFT, _TOP, _STEP, _HEIGHT, _LEGEND = 50, 40, 110, 320, 430
_STYLE = """<style>
svg { color: #1f2328; font: 12px sans-serif }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }
text { fill: currentColor } .grid { stroke: currentColor; opacity: .2 }
.line { fill: none; stroke-width: 2 } .thin { stroke-width: 1 } .goal { stroke-dasharray: 6 4; opacity: .8 }
.compiled { stroke-dasharray: 2 3 }
</style>"""

#: A peer and a scenario, and True if the router's modules were compiled.
_Row = tuple[str, str, bool]


def drawn(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the SVG of ``runs``: a line for each row of the router, and a dashed line for each goal.

    ``runs`` begins with the oldest run. Runs with compiled modules have lines of their own, which are dotted. A run
    without the field ``compiled`` had no compiled modules.
    """
    runs = [run for run in runs if run["benchmark"] == _BENCHMARK and any(map(_ratio, run["rows"]))]
    lines: dict[_Row, list[tuple[int, float]]] = {}
    for place, run in enumerate(runs):
        for row in run["rows"]:
            if row["peer"].startswith("router") and (ratio := _ratio(row)):
                key = (row["peer"], row["scenario"], run.get("compiled", False))
                lines.setdefault(key, []).append((place, ratio))
    top = max([2.0, *(ratio for line in lines.values() for _, ratio in line)]) * 1.05
    right = _LEFT + _STEP * max(1, len(runs) - 1)
    peers = dict.fromkeys([*_GOALS, *(peer for peer, *_ in lines)])
    colours = dict(zip(peers, cycle(_COLOURS), strict=False))

    def x(place: float) -> float:
        return _LEFT + place * _STEP

    def y(ratio: float) -> float:
        return round(_TOP + _HEIGHT * (1 - ratio / top), 1)

    parts = [f'<text x="{_LEFT}" y="20">requests that a core answers, divided by the gateway\'s</text>']
    for half in range(int(top * 2) + 1):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(half / 2)}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(half / 2) + 4}" text-anchor="end">{half / 2:.1f}</text>')
    for place, run in enumerate(runs):
        name = run["commit"] + ("*" if run["dirty"] else "")
        for text, below in ((name, 20), (run["date"][:10], 36)):
            middle = f'x="{x(place)}" y="{_TOP + _HEIGHT + below}" text-anchor="middle"'
            parts.append(f"<text {middle}>{escape(text)}</text>")
    legend = _TOP
    for peer, goal in _GOALS.items():
        parts.append(_line(f"{_LEFT},{y(goal)} {right},{y(goal)}", "line goal", colours[peer]))
        parts += _entry(right + 20, legend, f"{goal:.2f} goal of {peer}", "line goal", colours[peer])
        legend += 20
    for (peer, scenario, compiled), line in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        colour = colours[peer]
        kind = "line thin" if scenario.endswith("256 connections") else "line"
        kind += " compiled" * compiled
        parts.append(_line(" ".join(f"{x(place)},{y(ratio)}" for place, ratio in line), kind, colour))
        parts += [f'<circle cx="{x(place)}" cy="{y(ratio)}" r="3" fill="{colour}"/>' for place, ratio in line]
        name = f"{peer}, compiled" if compiled else peer
        parts += _entry(right + 20, legend, f"{line[-1][1]:.2f} {name}: {scenario}", kind, colour)
        legend += 20
    size = f"0 0 {right + _LEGEND} {max(_TOP + _HEIGHT + 50, legend)}"
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">', _STYLE, *parts, "</svg>\n"]
    )


def _ratio(row: Mapping[str, Any]) -> float | None:
    return row["baseline_cpu_us"] / row["cpu_us"] if row["baseline_cpu_us"] and row["cpu_us"] else None


def _line(points: str, kind: str, colour: str) -> str:
    return f'<polyline class="{kind}" stroke="{colour}" points="{points}"/>'


def _entry(left: float, top: float, text: str, kind: str, colour: str) -> list[str]:
    swatch = _line(f"{left},{top} {left + 24},{top}", kind, colour)
    return [swatch, f'<text x="{left + 32}" y="{top + 4}">{escape(text)}</text>']


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("history", nargs="?", type=Path, default=DEFAULT, help="the file of --history")
    parser.add_argument("svg", nargs="?", type=Path, default=_SVG, help="the file to write")
    given = parser.parse_args()
    given.svg.write_text(drawn([json.loads(line) for line in given.history.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
