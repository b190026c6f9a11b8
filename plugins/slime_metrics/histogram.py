"""Histograms of durations with fixed buckets, in plain numbers: an observation costs a fraction of a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

__all__ = ["Histogram", "histogram_family"]


class Histogram:
    """Counts of durations by the first bucket whose upper bound is not smaller, and their sum in seconds."""

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, duration_s)] += 1
        self.total_s += duration_s

    def add(self, other: Histogram, times: int = 1) -> None:
        """Add the counts of ``other``, which has the same bounds, or with -1 remove them."""
        for place, count in enumerate(other.counts):
            self.counts[place] += times * count
        self.total_s += times * other.total_s

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)


def histogram_family(
    name: str, help: str, labels: Sequence[str], found: Mapping[tuple[str, ...], Histogram]
) -> HistogramMetricFamily:
    """Return the metric; without a duration a series is left out."""
    family = HistogramMetricFamily(name, help, labels=labels)
    for values, histogram in found.items():
        cumulative = [*accumulate(histogram.counts)]
        if cumulative[-1]:
            bounds: Iterable[str] = map(floatToGoString, (*histogram.bounds, float("inf")))
            family.add_metric(values, [*zip(bounds, map(float, cumulative), strict=True)], histogram.total_s)
    return family
