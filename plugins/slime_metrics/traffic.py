"""Totals of all generations, for plugins that show traffic."""

from __future__ import annotations

from collections import Counter

from slime_metrics.contracts import Totals
from slime_metrics.counts import Counts
from slime_metrics.histogram import Histogram
from slime_metrics.labels import ENDPOINTS

__all__ = ["GenerationTraffic"]


class GenerationTraffic:
    """The component ``"traffic"``, see :class:`slime_metrics.contracts.Traffic`."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def totals(self) -> Totals:
        """Return the totals of now."""
        by_class: Counter[int] = Counter()
        incomplete: Counter[int] = Counter()
        whole, first_byte = Histogram(self.counts.bounds), Histogram(self.counts.bounds)
        for kind, series in self.counts.series.items():
            if kind.path in ENDPOINTS:
                by_class[kind.status // 100] += series.whole.count
                incomplete[kind.status // 100] += series.incomplete.total()
                whole.add(series.whole)
                first_byte.add(series.to_first_byte)
        return Totals(by_class, incomplete, whole.bounds, whole.counts, first_byte.counts)
