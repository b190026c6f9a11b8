"""Slots for requests, and the line in front of them: first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router_core.errors import HTTPError, ShuttingDown

__all__ = ["Place", "QueueFull", "RefilledSlots", "Slots"]


class QueueFull(HTTPError):
    """As many wait as may; asking again a little later helps."""

    status, type, code = 429, "too_many_requests", "QUEUE_FULL"
    headers = ((b"retry-after", b"1"),)  # the shortest that it can say


def _nobody() -> None:
    pass


class Place:
    """One request's place: it holds a slot, waits for one, or has left.

    ``call`` is called once when the wait ends otherwise than by leaving: with a slot, or without one for good.
    """

    __slots__ = ("_slots", "call", "held")

    def __init__(self, slots: Slots, *, held: bool) -> None:
        self._slots = slots
        self.held = held
        self.call: Callable[[], object] = _nobody

    def leave(self) -> None:
        """Give the slot back, which is the next one's from this moment, or leave the line. Idempotent."""
        self._slots.leave(self)


class Slots:
    """``limit`` slots, and a line of at most ``queue_size``.

    While anybody waits, no slot is free. Changed only by functions without ``await``: one event loop needs no lock.
    """

    def __init__(self, limit: int, queue_size: int) -> None:
        self.limit = limit
        self.queue_size = queue_size
        self.held = 0
        self.closed = False
        self._line: OrderedDict[Place, None] = (
            OrderedDict()
        )  # a dict finds its first in O(those that have left)

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._line)

    def take(self) -> Place:
        """A place: with a slot if one is free, else at the end of the line. Raises QueueFull and ShuttingDown. O(1)."""
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
        self._line[place] = None
        return place

    def leave(self, place: Place) -> None:
        """See :meth:`Place.leave`. O(1)."""
        if not place.held:
            self._line.pop(place, None)
            return
        place.held = False
        self._free()

    def _free(self) -> None:
        if self._line:
            first, _ = self._line.popitem(last=False)
            first.held = True
            first.call()
        elif self.held:
            self.held -= 1

    def close(self) -> None:
        """End all waits, present and future. Free slots are given as before."""
        self.closed = True
        line = list(self._line)
        self._line.clear()
        for place in line:
            place.call()


class RefilledSlots(Slots):
    """Slots of which ``per_s`` come free each second though those that have them go on: more than ``limit`` may then.

    The bucket of tokens of the SGLang gateway: ``limit`` tokens at first and never more, one less for each that goes
    on, one more for each that leaves, and ``per_s`` more a second. ``held`` is what is missing in it. Whoever
    has somebody wait calls :meth:`refill` in :meth:`next_s` again and again.
    """

    def __init__(self, limit: int, queue_size: int, per_s: int, clock: Callable[[], float]) -> None:
        super().__init__(limit, queue_size)
        self._per_s = per_s
        self._clock = clock
        self._refilled_at = 0.0  # the first request finds it full

    def take(self) -> Place:
        self.refill()
        return super().take()

    def refill(self) -> None:
        """Free what has come since: it goes to those that wait, first come, first served."""
        now = self._clock()
        come = int((now - self._refilled_at) * self._per_s)
        self._refilled_at += come / self._per_s
        for _ in range(min(come, self.held + self.waiting)):
            self._free()
        if not self.held:
            self._refilled_at = now  # a full bucket runs over

    def next_s(self) -> float:
        """Seconds until the next slot comes free even when no request ends."""
        return max(0.0, self._refilled_at + 1 / self._per_s - self._clock())
