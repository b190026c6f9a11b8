"""A limit on the requests in flight in front of a simulated fleet, and the queue of the requests that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.simulated.engine import Generation
from benchmarks.simulated.fleets import Done, Fleet
from benchmarks.simulated.prompts import Text
from router_core import Exchange, Worker
from slime_limits.queues import Queue, Rank

__all__ = ["Limited"]


class Limited:
    """A fleet that has at most ``limit`` requests in ``inner`` at once, as with ``--max-concurrent-requests``.

    The other requests wait in ``queue``. The time to the first token includes this wait. There are no sessions.
    """

    def __init__(self, inner: Fleet, limit: int, queue: Queue[Exchange], clock: Callable[[], float]) -> None:
        self._inner = inner
        self._free = limit
        self._queue = queue
        self._clock = clock
        self._waiting: dict[Exchange, Callable[[], None]] = {}

    @property
    def sent(self) -> Sequence[int]:
        return self._inner.sent

    def send(
        self, now: float, exchange: Exchange, prompt: Text, new_tokens: int, kept: Worker | None, done: Done
    ) -> None:
        """See :class:`benchmarks.simulated.fleets.Fleet`."""

        def ended(generation: Generation) -> None:
            generation.sent_s = now
            self._free += 1
            self._go_on()
            done(generation)

        def go() -> None:
            self._inner.send(self._clock(), exchange, prompt, new_tokens, None, ended)

        self._waiting[exchange] = go
        self._queue.add(exchange, Rank(0, new_tokens))
        self._go_on()

    def _go_on(self) -> None:
        while self._free and len(self._queue):
            self._free -= 1
            self._waiting.pop(self._queue.pop())()
