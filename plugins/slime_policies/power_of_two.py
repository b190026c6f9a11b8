"""Policy that chooses the less loaded of two random workers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.tokens_in_flight import TokensInFlight

__all__ = ["PowerOfTwo"]


class PowerOfTwo:
    """Chooses the less loaded of two random workers (Mitzenmacher, 2001).

    Without ``load`` the load is the requests in flight.
    """

    def __init__(self, load: TokensInFlight | None = None) -> None:
        self.load = load

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        two = random.sample(workers, 2) if len(workers) > 2 else workers
        return least_in_flight(two) if self.load is None else self.load.least(exchange, two)
