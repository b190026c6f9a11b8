"""The metrics of recorded rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from slime_r3.recorded_rows import RecordedRows

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["offer_metrics"]


def offer_metrics(metrics: Metrics | None, kinds: Mapping[str, RecordedRows]) -> None:
    """Offer the sizes and counters of ``kinds``, if there are metrics. ``kinds``: recorded rows by their field."""
    if metrics is None:
        return

    def each(number: Callable[[RecordedRows], int]) -> Callable[[], dict[str, float]]:
        return lambda: {name: number(rows) for name, rows in kinds.items()}

    def missing() -> dict[tuple[str, str], float]:
        return {
            (name, reason): count for name, rows in kinds.items() for reason, count in rows.misses.items()
        }

    metrics.counter(
        "slime_expert_rows_total",
        "Rows recorded from answers; a row belongs to one token, of the prompt or of the response.",
        each(lambda rows: rows.rows_recorded), ["kind"],
    )  # fmt: skip
    metrics.gauge(
        "slime_expert_bytes",
        "Bytes of the recorded rows in memory.",
        each(lambda rows: rows.turns.size_bytes),
        ["kind"],
    )
    metrics.gauge(
        "slime_expert_stored_bytes",
        "Bytes of the recorded rows that are in a store instead of memory.",
        each(lambda rows: rows.turns.stored_bytes),
        ["kind"],
    )
    metrics.gauge(
        "slime_expert_turns", "Answers whose rows are recorded.", each(lambda rows: len(rows.turns)), ["kind"]
    )
    metrics.counter(
        "slime_expert_dropped_total", "Answers whose rows were dropped, or lost by a store.",
        each(lambda rows: rows.turns.dropped), ["kind"],
    )  # fmt: skip
    metrics.counter(
        "slime_expert_missing_total",
        "Answers whose rows are not recorded, by reason.",
        missing,
        ["kind", "reason"],
    )
