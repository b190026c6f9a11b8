"""Queues of requests that wait for a slot: by arrival, or by priority and then the longest answer first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

__all__ = ["FirstCome", "LongestFirst", "Queue", "Rank", "rank_of"]

Item = TypeVar("Item", bound=Hashable)

#: SGLang's ``max_new_tokens`` of a request that names none.
_DEFAULT_LENGTH = 128
_LENGTHS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
#: Of this many requests that get a slot from the queue, one is the request that has waited longest.
_OLDEST_EVERY = 4
#: The heap may have this many more entries of requests that have left than of requests that wait.
_SPARE = 64


class Rank(NamedTuple):
    """The place of a request among those that wait: higher ``priority`` first, then greater ``length`` in tokens."""

    priority: float
    length: int


def rank_of(document: dict[str, Any]) -> Rank:
    """Return the rank of a request by its body. A request without ``priority`` comes after all that have one.

    ``length``: the largest of ``max_new_tokens``, ``max_completion_tokens`` and ``max_tokens``; 128 if there is none. A
    batch counts by its longest answer.
    """
    priority = document.get("priority")
    sampling = document.get("sampling_params")
    places = [document, *(sampling if isinstance(sampling, list) else [sampling])]
    lengths = [place.get(name) for place in places if isinstance(place, dict) for name in _LENGTHS]
    return Rank(
        priority if type(priority) is int else -inf,
        max((length for length in lengths if type(length) is int), default=_DEFAULT_LENGTH),
    )


class Queue(Protocol[Item]):
    """Requests that wait. ``discard`` is idempotent."""

    def __len__(self) -> int: ...

    def add(self, item: Item, rank: Rank) -> None:
        """Add a request. In a queue by rank, it comes after the requests of the same rank."""
        ...

    def pop(self) -> Item:
        """Remove and return the next request. Raises KeyError if none waits."""
        ...

    def discard(self, item: Item) -> None:
        """Remove a request, if it waits."""
        ...

    def clear(self) -> list[Item]:
        """Remove all requests, and return them in the order of their arrival."""
        ...


class FirstCome(Generic[Item]):
    """First come, first served. Each call takes O(1), ``clear`` O(requests)."""

    def __init__(self) -> None:
        self._line: OrderedDict[Item, None] = (
            OrderedDict()
        )  # a plain dict would find its first key in O(removed keys)

    def __len__(self) -> int:
        return len(self._line)

    def add(self, item: Item, rank: Rank) -> None:
        self._line[item] = None

    def pop(self) -> Item:
        return self._line.popitem(last=False)[0]

    def discard(self, item: Item) -> None:
        self._line.pop(item, None)

    def clear(self) -> list[Item]:
        items = list(self._line)
        self._line.clear()
        return items


class LongestFirst(FirstCome[Item]):
    """Highest priority first, then the longest answer, then the first to come, as in SGLang's ``lof``.

    Every fourth request that :meth:`pop` returns is the one that has waited longest. So each request is returned in the
    end: if ``n`` others have waited longer, it is among the next ``4 * (n + 1)``. ``add`` and ``pop`` take
    O(log requests), amortised.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, int, Item]] = []
        self._numbers = count()
        self._left = 0

    def add(self, item: Item, rank: Rank) -> None:
        super().add(item, rank)
        heappush(self._heap, (-rank.priority, -rank.length, next(self._numbers), item))
        if len(self._heap) > 2 * len(self._line) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[-1] in self._line]
            heapify(self._heap)

    def pop(self) -> Item:
        self._left += 1
        if self._left % _OLDEST_EVERY == 0:
            return super().pop()
        while self._heap:
            item = heappop(self._heap)[-1]
            if item in self._line:
                self.discard(item)
                return item
        return super().pop()

    def clear(self) -> list[Item]:
        self._heap.clear()
        return super().clear()
