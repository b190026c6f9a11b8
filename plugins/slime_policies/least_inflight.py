"""The worker with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight

__all__ = ["LeastInflight"]


class LeastInflight:
    """Fewest requests in flight, ties broken at random: what the core does without any policy."""

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return least_in_flight(workers)
