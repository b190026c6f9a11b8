"""One frame of ``top``: the figures as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from slime_top.figures import Figures, Latency, WorkerFigures

__all__ = ["frame"]

_STATES = {
    "ready": "green",
    "joining": "cyan",
    "draining": "yellow",
    "stale": "yellow",
    "quarantined": "bold red",
}
_HEADERS = ("worker", "state", "in flight", "tokens/s", "weights", "breaker", "why")
#: Longer URLs, versions and the like are cut off.
_WIDEST = 40
#: Lines of a frame that are kept for other things than the rows of workers.
_OTHER_LINES = 12


def frame(figures: Figures | None, url: str, height: int | None = None, trouble: str = "") -> RenderableType:
    """Return the frame, of at most ``height`` lines (or 12, if ``height`` is less).

    ``trouble``: the reason why the figures are old, or ``""``.
    """
    title = Text.assemble(
        ("slime-router ", "bold"), ((figures and figures.version) or "", "bold"), f"  {url}"
    )
    if figures is not None and figures.up_s is not None:
        title.append(f"  up {_duration(figures.up_s)}")
    lines: list[RenderableType] = [_one_line(title)]
    lines.append(_one_line(Text(trouble, "bold red")))
    if figures is not None:
        rows = len(figures.workers) if height is None else max(1, height - _OTHER_LINES)
        lines += [_summary(figures), Text(), _workers(figures.workers, rows)]
    return Group(*lines)


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _summary(figures: Figures) -> Table:
    # With a ratio, a column gets the width that other columns do not need. Without a ratio, long values would also
    # narrow the labels.
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_row("fleet", _fleet(figures))
    if not figures.has_metrics:
        table.add_row("metrics", Text("none: the router runs without the plugin metrics", "yellow"))
        return table
    traffic = [f"{_rate(figures.requests_per_s)} requests/s", f"{figures.in_flight} in flight"]
    if figures.queued is not None:
        traffic.append(f"{figures.queued} queued")
    traffic += [f"{figures.retries} retries"] * bool(figures.retries)
    table.add_row("traffic", ", ".join(traffic))
    errors = _counted(figures.errors)
    table.add_row("errors", Text(errors, "yellow") if errors else "none since the start")
    table.add_row("latency", _latencies(figures))
    tokens = f"{_rate(figures.tokens_in_per_s)} in/s, {_rate(figures.tokens_out_per_s)} out/s"
    if figures.cache_hit_rate is not None:
        tokens += f", {figures.cache_hit_rate:.0%} of prompts continue recorded ones"
    table.add_row("tokens", tokens)
    for name, counts in (("sampled", figures.generated), ("retrieved", figures.retrieved)):
        table.add_row(
            name, _exactness(counts) if figures.has_records else "unknown without the plugin radix_cache"
        )
    return table


def _fleet(figures: Figures) -> Text:
    ready = sum(worker.state == "ready" and not worker.holds for worker in figures.workers)
    text = Text(f"{ready} of {len(figures.workers)} workers ready, weights ")
    text.append(figures.weight_version or "unknown", "bold")
    if figures.weights_age_s is not None:
        text.append(f" for {_duration(figures.weights_age_s)}")
    if figures.is_paused:
        text.append(", ")
        text.append(f"PAUSED, {figures.paused_requests} wait", "bold yellow")
    return text


def _latencies(figures: Figures) -> str:
    if figures.latency is None:
        return "no request to a worker has ended"
    span = (
        "since the start" if figures.latency_span_s is None else f"last {_duration(figures.latency_span_s)}"
    )
    first = f", first byte {_quantiles(figures.first_byte)}" if figures.first_byte is not None else ""
    return f"{_quantiles(figures.latency)}{first} ({span})"


def _quantiles(latency: Latency) -> str:
    return f"p50 {_seconds(latency.p50)}, p95 {_seconds(latency.p95)}"


def _exactness(counts: Mapping[str, int]) -> Text:
    inexact = {reason: count for reason, count in counts.items() if reason != "exact"}
    text = Text(f"{counts.get('exact', 0)} exact")
    if inexact:
        text.append(f", {sum(inexact.values())} not: {_counted(inexact)}", "yellow")
    return text


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _workers(workers: Sequence[WorkerFigures], rows: int) -> Group:
    """Return the table of workers, with at most ``rows`` lines below its header.

    The workers that get no requests come first.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=True)
    for name in _HEADERS:
        justify: JustifyMethod = "right" if name in ("in flight", "tokens/s") else "left"
        # The last column gets the width that the other columns do not need.
        ratio, widest = (1, None) if name == "why" else (None, _WIDEST)
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", justify=justify, ratio=ratio, max_width=widest
        )
    ordered = sorted(workers, key=lambda worker: (worker.state == "ready" and not worker.holds, worker.url))
    shown = ordered if len(ordered) <= rows else ordered[: rows - 1]
    for worker in shown:
        is_open = worker.breaker not in (None, "closed")
        table.add_row(
            worker.url.removeprefix("http://"),
            Text(worker.state, _STATES.get(worker.state, "")),
            str(worker.in_flight),
            _rate(worker.tokens_per_s),
            worker.weight_version or "-",
            Text(worker.breaker or "-", "bold red" if is_open else ""),
            _why(worker),
        )
    if not ordered:
        return Group(table, Text("none: POST /workers adds one", "yellow"))
    rest = len(ordered) - len(shown)
    return Group(table, Text(f"and {rest} more", "dim")) if rest else Group(table)


def _why(worker: WorkerFigures) -> str:
    """Return the reasons, without the worker's own URL. ``joining`` comes last: any other reason says more."""
    owners = sorted(worker.holds, key=lambda owner: owner == "joining")
    own_url = re.compile(rf"(worker )?{re.escape(worker.url)}(?![.:]?[\w/@-]):? ?")
    return "; ".join(f"{owner}: {own_url.sub('', worker.holds[owner])}" for owner in owners)


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.0f}k"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _duration(value: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"
