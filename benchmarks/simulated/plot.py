"""Plot of the simulation, as an SVG: a row for each workload, a dot for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

__all__ = ["drawn"]

_PANELS = (("hit", "hit rate", False), ("ttft_ms", "TTFT p95", True), ("makespan_s", "makespan", True))
_REFERENCE = "round_robin"
#: The largest ratio that is drawn. The dots of larger ratios lie on the edge.
_MOST = 2.0
_COLOURS = ("#8b949e", "#ca8a04", "#06b6d4", "#d946ef", "#f97316", "#3b82f6", "#16a34a")
_LEFT, _TOP, _ROW, _WIDTH, _GAP = 380, 90, 34, 220, 40
_STYLE = """<style>
svg { color: #1f2328; font: 12px sans-serif }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }
text { fill: currentColor } .grid { stroke: currentColor; opacity: .2 } .one { stroke: currentColor; opacity: .6 }
</style>"""

Samples = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]


def drawn(samples: Samples, policies: Sequence[str]) -> str:
    """Return the SVG. ``samples``: by workload, policy and seed. Times are ratios to those of ``round_robin``."""
    bottom = _TOP + _ROW * len(samples)
    parts = []
    for number, policy in enumerate(policies):
        column, line = _LEFT + number % 4 * 190, 20 + number // 4 * 20
        parts.append(f'<circle cx="{column}" cy="{line - 4}" r="5" fill="{_COLOURS[number]}"/>')
        parts.append(f'<text x="{column + 12}" y="{line}">{escape(policy)}</text>')
    for row, workload in enumerate(samples):
        y = _TOP + _ROW * row + _ROW / 2
        parts.append(f'<path class="grid" d="M0 {y + _ROW / 2:g}H{_LEFT + 3 * _WIDTH + 2 * _GAP}"/>')
        parts.append(f'<text x="{_LEFT - 16}" y="{y + 4}" text-anchor="end">{escape(workload)}</text>')
    for number, (figure, title, is_ratio) in enumerate(_PANELS):
        left = _LEFT + number * (_WIDTH + _GAP)
        most = _MOST if is_ratio else 1.0
        of = f"{title} / that of {_REFERENCE}" if is_ratio else title
        parts.append(f'<text x="{left}" y="{_TOP - 22}">{of}</text>')
        for tick in (0.0, 0.5, 1.0, 1.5, 2.0) if is_ratio else (0.0, 0.5, 1.0):
            x = left + _WIDTH * tick / most
            kind = "one" if is_ratio and tick == 1 else "grid"
            parts.append(f'<path class="{kind}" d="M{x:g} {_TOP}V{bottom}"/>')
            parts.append(f'<text x="{x:g}" y="{_TOP - 6}" text-anchor="middle">{tick:g}</text>')
        for row, peers in enumerate(samples.values()):
            for place, policy in enumerate(policies):
                value = _median(peers[policy], figure) / (
                    _median(peers[_REFERENCE], figure) if is_ratio else 1
                )
                x = left + _WIDTH * min(value, most) / most
                y = _TOP + _ROW * row + _ROW * (place + 1) / (len(policies) + 1)
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[place]}">'
                    f"<title>{escape(policy)}: {value:.2f}</title></circle>"
                )
    size = f"0 0 {_LEFT + 3 * (_WIDTH + _GAP)} {bottom + 10}"
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">', _STYLE, *parts, "</svg>\n"]
    )


def _median(samples: Sequence[Mapping[str, float]], figure: str) -> float:
    return median(sample[figure] for sample in samples)
