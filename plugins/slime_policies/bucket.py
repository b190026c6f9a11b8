"""Prompts of like length to the same worker."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.settings import Settings, unbalanced

__all__ = ["Bucket"]

#: Requests whose lengths are remembered.
_REMEMBERED = 2048


class Bucket:
    """Of prefill workers: each gets the requests of a range of lengths, so that no short one waits behind a long one.

    The ranges are such that each worker would have got the same bytes of the last 2,048 requests. They are divided
    anew every ``bucket_adjust_interval_secs``, and when twice as many are known. When the loads differ too much:
    fewest in flight, as with ``cache_aware``.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._bounds: list[int] = []
        self._divided_at = -settings.bucket_adjust_interval_secs
        self._divided = 0

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        size = len(exchange.request.body)
        self._sizes.append(size)
        now = self._clock()
        due = now - self._divided_at >= self._settings.bucket_adjust_interval_secs
        more = len(self._sizes) >= 2 * self._divided  # at first, when few are known, each tells much
        if due or more or len(self._bounds) != len(workers) - 1:
            self._divided_at, self._divided = now, len(self._sizes)
            self._bounds = _divided(sorted(self._sizes), len(workers))
        if unbalanced(workers, self._settings):
            return least_in_flight(workers)
        first, last = bisect_left(self._bounds, size), bisect_right(self._bounds, size)
        return least_in_flight(workers[first : last + 1])  # several, when most prompts are of one length


def _divided(sizes: list[int], parts: int) -> list[int]:
    """Bounds that cut ``sizes``, which are sorted, into ``parts`` of about the same sum."""
    bounds: list[int] = []
    share, total = sum(sizes) / parts, 0
    for size in sizes:
        total += size
        while total >= share * (len(bounds) + 1) and len(bounds) < parts - 1:
            bounds.append(size)
    return bounds
