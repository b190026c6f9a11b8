"""Rates and latencies of the last hour, one sample every few seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slime_dashboard.numbers import Cumulative

__all__ = ["History", "Sample", "quantile"]


class Sample(NamedTuple):
    """Numbers of one interval, which ends at ``time`` (Unix time in seconds).

    A field is None if no plugin measures it, or if the interval had nothing to measure. The fields from ``succeeded``
    to ``sampled_tokens`` are numbers per second. ``first_*`` and ``whole_*`` are quantiles of times in seconds: to the
    first byte of a streamed answer, and to the end of an answer. ``hit_rate`` is the share of prompts that hit the
    cache.
    """

    time: float
    succeeded: float | None = None
    refused: float | None = None
    failed: float | None = None
    prompt_tokens: float | None = None
    sampled_tokens: float | None = None
    first_p50: float | None = None
    first_p95: float | None = None
    whole_p50: float | None = None
    whole_p95: float | None = None
    hit_rate: float | None = None
    in_flight: int | None = None
    waiting: float | None = None


class History:
    """The latest samples, at most ``size`` of them.

    ``read`` returns the present totals. ``clock`` never goes back; ``time`` returns Unix time.
    """

    def __init__(
        self, size: int, read: Callable[[], Cumulative], clock: Callable[[], float], time: Callable[[], float]
    ) -> None:
        self._samples: deque[Sample] = deque(maxlen=size)
        self._read = read
        self._clock = clock
        self._time = time
        self._last_at = clock()
        self._last = read()

    def sample(self, in_flight: int, waiting: float) -> None:
        """Add a sample of the time since the last sample."""
        now, totals = self._clock(), self._read()
        before, elapsed_s = self._last, now - self._last_at
        if elapsed_s <= 0:
            return
        self._last_at, self._last = now, totals
        first = _difference(totals.first_byte, before.first_byte)
        whole = _difference(totals.whole, before.whole)
        self._samples.append(
            Sample(
                round(self._time(), 1),
                _rate(totals.succeeded, before.succeeded, elapsed_s),
                _rate(totals.refused, before.refused, elapsed_s),
                _rate(totals.failed, before.failed, elapsed_s),
                _rate(totals.prompt_tokens, before.prompt_tokens, elapsed_s),
                _rate(totals.sampled_tokens, before.sampled_tokens, elapsed_s),
                quantile(totals.bounds, first, 0.5),
                quantile(totals.bounds, first, 0.95),
                quantile(totals.bounds, whole, 0.5),
                quantile(totals.bounds, whole, 0.95),
                _share(totals.hits, before.hits, totals.prompts, before.prompts),
                in_flight,
                waiting,
            )
        )

    def since(self, time: float) -> dict[str, list[float | None]]:
        """Return the samples after ``time`` as columns, by the names of the fields."""
        found = [sample for sample in self._samples if sample.time > time]
        return {name: [sample[place] for sample in found] for place, name in enumerate(Sample._fields)}


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the quantile ``share`` (0 to 1) of durations, interpolated as Prometheus does; None without a duration.

    ``counts``: the number of durations in each bucket. ``bounds``: the buckets' upper bounds. The last count is for
    durations above all bounds. Such a duration counts as equal to the last bound.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below, lower = share * total, 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return _short(lower + (bound - lower) * (wanted - below) / count)
        below += count
        lower = bound
    return lower


def _difference(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [max(0, one - other) for one, other in zip(now, before, strict=True)]


def _rate(now: float | None, before: float | None, elapsed_s: float) -> float | None:
    return None if now is None or before is None else _short(max(0.0, now - before) / elapsed_s)


def _share(
    part: float | None, part_before: float | None, whole: float | None, whole_before: float | None
) -> float | None:
    if part is None or part_before is None or whole is None or whole_before is None or whole <= whole_before:
        return None
    return _short((part - part_before) / (whole - whole_before))


def _short(number: float) -> float:
    """Round to four significant digits: the page shows no more digits."""
    return float(f"{number:.4g}")
