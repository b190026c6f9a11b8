"""The load of a worker, and its place in the map of prefixes, as ``cache_aware`` keeps them."""

from __future__ import annotations

from router_core import Worker

__all__ = ["REQUEST", "WorkerState"]

#: The cost of a request in flight, in tokens.
REQUEST = 240.0
#: Tokens that a worker prefills in a second, roughly. A quarter of this number, or four times it, is hardly worse.
_PREFILL_PER_S = 16_000.0
#: The cost of a token that a worker probably still has to prefill.
_WAITING = 0.5


class WorkerState:
    """State of one worker. ``waiting``: tokens that it had to prefill at ``at``, a time in seconds.

    ``bit`` stands for the worker in the map of prefixes. It becomes 0 when the worker's cache is forgotten: from then
    on the worker has another state object. ``chosen``: the number of the last choice of the worker. ``missed``: last
    uses of prefixes that were believed to be in its cache, but were not.

    Each request for a long answer counts as several requests (see LongRequests). ``long``: by how much the sum of these
    counts exceeds the number of the worker's requests for long answers. ``more``: what ``long`` adds to the requests in
    flight when a short request gets a worker; it is always less than one.
    """

    __slots__ = ("at", "bit", "chosen", "long", "missed", "more", "waiting")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.chosen = 0
        self.long = 0
        self.more = 0.0
        self.waiting = 0.0
        self.at = 0.0
        self.missed: list[int] = []

    def load(self, worker: Worker, now: float) -> float:
        """Return the cost of the load of ``worker``, in tokens. Subtract from ``waiting`` what is prefilled by now."""
        in_flight = worker.in_flight + self.more
        if not self.waiting:
            return REQUEST * in_flight
        left = self.waiting - (now - self.at) * _PREFILL_PER_S
        self.waiting = left if left > 0 and in_flight else 0.0
        self.at = now
        return REQUEST * in_flight + _WAITING * self.waiting

    def add_long(self, requests: int) -> None:
        """Add ``requests``, which may be negative, to the further requests for long answers."""
        self.long += requests
        self.more = self.long / (1 + self.long)

    def add(self, worker: Worker, tokens: float, now: float) -> None:
        """Count ``tokens`` that ``worker`` has to prefill from ``now`` on."""
        self.load(worker, now)
        self.waiting += tokens
        self.at = now
