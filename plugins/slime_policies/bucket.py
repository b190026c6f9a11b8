"""Policy for prefill workers: requests of similar length go to the same worker."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.settings import Settings, unbalanced
from slime_policies.tokens_in_flight import change_total

__all__ = ["Bucket"]

#: The number of requests whose lengths are remembered.
_REMEMBERED = 2048


class Bucket:
    """Gives each prefill worker a range of request lengths, so that short requests need not wait behind long ones.

    With these ranges each worker would have got about the same number of bytes of the last 2,048 requests. The ranges
    are computed again every ``bucket_adjust_interval_secs``, when the number of known lengths has doubled, and when the
    number of workers has changed.

    A worker's load is the bytes that it was sent in the last interval, as in the SGLang gateway. Loads are unbalanced
    when they differ by more than ``balance_abs_threshold`` and by more than a factor of ``balance_rel_threshold``. With
    unbalanced loads the worker with the least load is chosen, whatever the length.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._bounds: list[int] = []
        self._divided_at = -settings.bucket_adjust_interval_secs
        self._divided_sizes = 0
        #: The requests of the last interval: time, bytes and the worker's id.
        self._sent: deque[tuple[float, int, str]] = deque()
        self._loads: dict[str, int] = {}

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        size = len(exchange.request.body)
        self._sizes.append(size)
        now = self._clock()
        due = now - self._divided_at >= self._settings.bucket_adjust_interval_secs
        more = len(self._sizes) >= 2 * self._divided_sizes  # at first, each length changes the ranges much
        if due or more or len(self._bounds) != len(workers) - 1:
            self._divided_at, self._divided_sizes = now, len(self._sizes)
            self._bounds = _bounds_of(sorted(self._sizes), len(workers))
        loads = self._loads_of(workers, now)
        if unbalanced(loads, self._settings):
            least = min(loads)
            likely = [worker for worker, load in zip(workers, loads, strict=True) if load == least]
        else:
            first, last = bisect_left(self._bounds, size), bisect_right(self._bounds, size)
            likely = [*workers[first : last + 1]]  # several workers, if a bound equals this length
        chosen = least_in_flight(likely)
        self._sent.append((now, size, chosen.id))
        change_total(self._loads, chosen.id, size)
        return chosen

    def _loads_of(self, workers: Sequence[Worker], now: float) -> list[int]:
        """Return the bytes that each of ``workers`` was sent in the last interval."""
        while self._sent and now - self._sent[0][0] > self._settings.bucket_adjust_interval_secs:
            _, size, name = self._sent.popleft()
            change_total(self._loads, name, -size)
        return [self._loads.get(worker.id, 0) for worker in workers]


def _bounds_of(sizes: list[int], parts: int) -> list[int]:
    """Return bounds that cut the sorted ``sizes`` into ``parts`` of about the same sum."""
    bounds: list[int] = []
    share, total = sum(sizes) / parts, 0
    for size in sizes:
        total += size
        while total >= share * (len(bounds) + 1) and len(bounds) < parts - 1:
            bounds.append(size)
    return bounds
