"""Policy that chooses the less loaded of two random workers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight

__all__ = ["PowerOfTwo"]


class PowerOfTwo:
    """The one of two random workers that has fewer requests in flight (Mitzenmacher, 2001)."""

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return least_in_flight(random.sample(workers, 2) if len(workers) > 2 else workers)
