"""Requests that ask for much longer answers than other requests. Each counts as several requests in the load."""

from __future__ import annotations

from functools import partial

from router_core import Exchange
from slime_policies.request_tokens import MeanLength, limit_beside_prompt
from slime_policies.worker_state import WorkerState

__all__ = ["LongRequests"]

#: A request counts as ``limit / (_FOR_EACH * mean limit)`` requests, rounded down, but as one at least.
_FOR_EACH = 2.0
#: A request counts as this many requests at most, so that one absurd limit does not keep all other requests away.
_MOST = 8


class LongRequests:
    """Counts a request with ``n`` times the mean limit as ``n / 2`` requests, rounded down, but at least 1, at most 8.

    The limit is ``max_new_tokens``. The mean is about that of the last 256 requests with a limit. If all limits are
    equal, each request counts as one. The load of a worker depends on the request that is to be placed. For a long
    request, each long request of the worker counts in full. For a short request, each long request of the worker counts
    as one; all that they count beyond this adds less than one request to the load. So a short request prefers a worker
    that can begin it at once.
    """

    def __init__(self) -> None:
        self._mean = MeanLength()
        self._counted: dict[Exchange, tuple[WorkerState, int]] = {}

    def more(self, exchange: Exchange, start: int | None) -> int:
        """Return as how many requests ``exchange`` counts, less one. ``start``: the place of the prompt in the body."""
        limit = limit_beside_prompt(exchange.request.body, start)
        if not limit:
            return 0
        self._mean.learn(limit)
        return max(0, min(_MOST, int(limit / (_FOR_EACH * self._mean.tokens))) - 1)

    def count(self, exchange: Exchange, state: WorkerState, more: int) -> None:
        """Count ``more`` further requests for ``exchange`` at one worker only, until the exchange ends."""
        self._end(exchange)  # until now it may count at the worker of an earlier attempt
        if more:
            state.add_long(more)
            self._counted[exchange] = state, more
            exchange.on_close(partial(self._end, exchange))

    def _end(self, exchange: Exchange) -> None:
        state, more = self._counted.pop(exchange, (None, 0))
        if state is not None:
            state.add_long(-more)
