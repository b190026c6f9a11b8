"""Times for which requests waited, by the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from prometheus_client.core import HistogramMetricFamily

from slime_logging.waits import Wait
from slime_metrics.histogram import Histogram, histogram_family

__all__ = ["WaitTimes"]


class WaitTimes:
    """The component ``"wait_times"``, which :class:`slime_logging.waits.Waits` finds.

    ``bounds``: the upper bounds of the histograms' buckets.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._times: dict[Wait, Histogram] = {why: Histogram(bounds) for why in ("queue", "pause", "retry")}

    @contextmanager
    def waiting(self, why: Wait) -> Iterator[None]:
        """Count the duration of the block, also if it raises."""
        began = monotonic()
        try:
            yield
        finally:
            self._times[why].observe(monotonic() - began)

    def family(self) -> HistogramMetricFamily:
        """Return the metric with the numbers of now."""
        return histogram_family(
            "slime_request_wait_seconds", "Times for which requests waited, by the reason.", ["reason"],
            {(why,): times for why, times in self._times.items()},
        )  # fmt: skip
