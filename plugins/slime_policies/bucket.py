"""Policy for prefill workers: requests of similar length go to the same worker."""

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
    """Gives each prefill worker a range of request lengths, so that no short request waits behind a long one.

    With these ranges each worker would have got the same number of bytes of the last 2,048 requests. The ranges are
    computed again every ``bucket_adjust_interval_secs``, and when the number of known lengths has doubled or that of
    workers has changed. When the loads differ too much, the worker with the fewest requests in flight is chosen.
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
        more = len(self._sizes) >= 2 * self._divided  # at first, each length changes the ranges much
        if due or more or len(self._bounds) != len(workers) - 1:
            self._divided_at, self._divided = now, len(self._sizes)
            self._bounds = _divided(sorted(self._sizes), len(workers))
        if unbalanced(workers, self._settings):
            return least_in_flight(workers)
        first, last = bisect_left(self._bounds, size), bisect_right(self._bounds, size)
        return least_in_flight(workers[first : last + 1])  # several workers, when most lengths are equal


def _divided(sizes: list[int], parts: int) -> list[int]:
    """Return bounds that cut the sorted ``sizes`` into ``parts`` of about the same sum."""
    bounds: list[int] = []
    share, total = sum(sizes) / parts, 0
    for size in sizes:
        total += size
        while total >= share * (len(bounds) + 1) and len(bounds) < parts - 1:
            bounds.append(size)
    return bounds
