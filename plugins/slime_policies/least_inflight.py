"""Policy that chooses the worker with the least load."""

from __future__ import annotations

from collections.abc import Sequence

from router_core import Exchange, Worker
from router_core.workers import least_in_flight
from slime_policies.tokens_in_flight import TokensInFlight

__all__ = ["LeastInflight"]


class LeastInflight:
    """Chooses the worker with the least load; ties go to the fewest requests in flight, then at random.

    Without ``load`` the load is the requests in flight, as in the core without a policy.
    """

    def __init__(self, load: TokensInFlight | None = None) -> None:
        self.load = load

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return least_in_flight(workers) if self.load is None else self.load.least(exchange, workers)
