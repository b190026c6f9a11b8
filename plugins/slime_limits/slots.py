"""Slots for requests, and the queue for them."""

from __future__ import annotations

from collections.abc import Callable

from router_core.errors import HTTPError, ShuttingDown
from slime_limits.queues import FirstCome, Queue, Rank

__all__ = ["Place", "QueueFull", "RefilledSlots", "Slots"]


class QueueFull(HTTPError):
    """The queue is full; trying again a little later may help."""

    status, type, code = 429, "too_many_requests", "QUEUE_FULL"
    headers = ((b"retry-after", b"1"),)  # the shortest wait above 0 that the header can ask for


def _nobody() -> None:
    pass


def _no_rank() -> Rank:
    return Rank(0, 0)


class Place:
    """One request's place: it holds a slot, waits for one, or has left.

    ``call`` is called once when the wait ends because the place got a slot, or because of :meth:`Slots.close`. It is
    not called when the request leaves.
    """

    __slots__ = ("_slots", "call", "held")

    def __init__(self, slots: Slots, *, held: bool) -> None:
        self._slots = slots
        self.held = held
        self.call: Callable[[], object] = _nobody

    def leave(self) -> None:
        """Return the slot, which the next waiting request gets at once. Without a slot, leave the queue. Idempotent."""
        self._slots.leave(self)


class Slots:
    """``limit`` slots, and a queue of at most ``queue_size`` requests.

    While a request waits, no slot is free. Every method is synchronous, so on one event loop the slots need no lock.
    """

    def __init__(self, limit: int, queue_size: int, queue: Queue[Place] | None = None) -> None:
        self.limit = limit
        self.queue_size = queue_size
        self.held = 0
        self.closed = False
        self._line: Queue[Place] = FirstCome() if queue is None else queue

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._line)

    def take(self, rank: Callable[[], Rank] = _no_rank) -> Place:
        """Return a place with a slot if a slot is free, else a place in the queue. Raises QueueFull and ShuttingDown.

        ``rank`` is called for a request that has to wait.
        """
        if self.held < self.limit:
            self.held += 1
            return Place(self, held=True)
        if self.closed:
            raise ShuttingDown("the router is shutting down")
        if len(self._line) >= self.queue_size:
            raise QueueFull(
                f"no slot of {self.limit} is free (--max-concurrent-requests)"
                f" and {len(self._line)} wait (--queue-size)"
            )
        place = Place(self, held=False)
        self._line.add(place, rank())
        return place

    def leave(self, place: Place) -> None:
        """See :meth:`Place.leave`."""
        if not place.held:
            self._line.discard(place)
            return
        place.held = False
        self._free()

    def _free(self) -> None:
        if self._line:
            first = self._line.pop()
            first.held = True
            first.call()
        elif self.held:
            self.held -= 1

    def close(self) -> None:
        """End all waits, and allow no new ones. Free slots are still given."""
        self.closed = True
        for place in self._line.clear():
            place.call()


class RefilledSlots(Slots):
    """A token bucket, as in the SGLang gateway; ``held`` is the number of missing tokens.

    The bucket has ``limit`` tokens at first, and never more. A request takes a token and returns it at its end.
    ``per_s`` tokens are added each second, so more than ``limit`` requests may run. While a request waits, the
    owner of the slots must call :meth:`refill` whenever :meth:`next_s` seconds have passed.
    """

    def __init__(
        self,
        limit: int,
        queue_size: int,
        per_s: int,
        clock: Callable[[], float],
        queue: Queue[Place] | None = None,
    ) -> None:
        super().__init__(limit, queue_size, queue)
        self._per_s = per_s
        self._clock = clock
        self._refilled_at = 0.0  # the first refill sets it: the bucket is full then

    def take(self, rank: Callable[[], Rank] = _no_rank) -> Place:
        self.refill()
        return super().take(rank)

    def refill(self) -> None:
        """Add the tokens of the time since the last call; waiting requests get them."""
        now = self._clock()
        come = int((now - self._refilled_at) * self._per_s)
        self._refilled_at += come / self._per_s
        for _ in range(min(come, self.held + self.waiting)):
            self._free()
        if not self.held:
            self._refilled_at = now  # a full bucket takes no fraction of a token

    def next_s(self) -> float:
        """Return the seconds until the next token is added."""
        return max(0.0, self._refilled_at + 1 / self._per_s - self._clock())
