"""Histograms of durations with fixed buckets. Durations are collected in lists, and counted together later."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

__all__ = ["BATCH", "Histogram", "histogram_family"]


#: Durations that are counted together, which costs less than one by one.
BATCH = 256


class Histogram:
    """Counts of durations by bucket, and the sum of the durations in seconds.

    A duration counts in the first bucket whose upper bound is at least the duration. ``new``: durations that are not
    counted yet, less than ``BATCH``.
    """

    __slots__ = ("_counts", "_total_s", "bounds", "new")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.new: list[float] = []
        self._counts = [0] * (len(bounds) + 1)
        self._total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration."""
        self.new.append(duration_s)
        if len(self.new) >= BATCH:
            self.settle()

    def settle(self) -> None:
        """Count the durations in ``new``."""
        new, counts, bounds = self.new, self._counts, self.bounds
        if not new:
            return
        new.sort()
        self._total_s += sum(new)
        last = bisect_left(bounds, new[-1])
        counted = 0
        for place in range(bisect_left(bounds, new[0]), last):
            until = bisect_right(new, bounds[place], counted)
            counts[place] += until - counted
            counted = until
        counts[last] += len(new) - counted
        new.clear()

    def add(self, other: Histogram) -> None:
        """Add the counts of ``other``, which has the same bounds."""
        counts = self.counts
        for place, count in enumerate(other.counts):
            counts[place] += count
        self._total_s += other.total_s

    @property
    def counts(self) -> list[int]:
        """The number of durations by bucket."""
        self.settle()
        return self._counts

    @property
    def total_s(self) -> float:
        """The sum of the durations."""
        self.settle()
        return self._total_s

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)


def histogram_family(
    name: str, help: str, labels: Sequence[str], found: Mapping[tuple[str, ...], Histogram]
) -> HistogramMetricFamily:
    """Return the metric. A series without durations is left out."""
    family = HistogramMetricFamily(name, help, labels=labels)
    for values, histogram in found.items():
        cumulative = [*accumulate(histogram.counts)]
        if cumulative[-1]:
            bounds: Iterable[str] = map(floatToGoString, (*histogram.bounds, float("inf")))
            family.add_metric(values, [*zip(bounds, map(float, cumulative), strict=True)], histogram.total_s)
    return family
