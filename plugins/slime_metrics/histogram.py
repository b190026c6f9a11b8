"""Histograms of durations with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

__all__ = ["Histogram", "histogram_family"]


class Histogram:
    """Counts of durations by bucket, and the sum of the durations in seconds.

    A duration counts in the first bucket whose upper bound is at least the duration.
    """

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, duration_s)] += 1
        self.total_s += duration_s

    def observe_all(self, durations_s: NDArray[np.float64]) -> None:
        """Count many durations. This takes much less time than calling :meth:`observe` for each."""
        places = np.searchsorted(self.bounds, durations_s)
        self._add(np.bincount(places, minlength=len(self.counts)).tolist(), float(durations_s.sum()))

    def add(self, other: Histogram) -> None:
        """Add the counts of ``other``, which has the same bounds."""
        self._add(other.counts, other.total_s)

    def _add(self, counts: Iterable[int], total_s: float) -> None:
        for place, count in enumerate(counts):
            self.counts[place] += count
        self.total_s += total_s

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
