"""At which places of conversations a session has asked, and which contexts it went on from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["Speakers"]

#: Requests without a turn that are remembered.
_REMEMBERED = 16_384
#: A place in a conversation.
Place = bytes
Context = TypeVar("Context", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Speakers(Generic[Context]):
    """Requests by session and place, each with the context that it went on from. A look is O(places looked at).

    One that is :meth:`deciding` has a place and, for a moment, no context yet.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[str, Place], dict[Context | None, int]] = {}
        self._deciding: dict[tuple[str, Place], int] = {}
        self._left: deque[tuple[str, Place, Context | None]] = deque()

    def add(self, session: str, place: Place, context: Context | None) -> None:
        """``session`` asked at ``place``, behind ``context``."""
        contexts = self._asked.setdefault((session, place), {})
        contexts[context] = contexts.get(context, 0) + 1

    def remove(self, session: str, place: Place, context: Context | None) -> None:
        """Undo one :meth:`add`."""
        contexts = self._asked[session, place]
        _count_down(contexts, context)
        if not contexts:
            del self._asked[session, place]

    def leave(self, session: str, place: Place, context: Context | None) -> str | None:
        """A request that was added has ended. Without a turn of its own it stays; the oldest such one makes room.

        Returns the session of the one that had to go.
        """
        if self._asked[session, place][context] > 1:  # the turn was added, too
            self.remove(session, place, context)
            return None
        self._left.append((session, place, context))
        if len(self._left) <= _REMEMBERED:
            return None
        oldest = self._left.popleft()
        self.remove(*oldest)
        return oldest[0]

    def deciding(self, session: str, place: Place) -> Callable[[], None]:
        """``session`` asks at ``place``; the context is not known until the function returned is called."""
        at = (session, place)
        self._deciding[at] = self._deciding.get(at, 0) + 1
        return lambda: _count_down(self._deciding, at)

    def contexts(self, session: str, places: Sequence[Place], own: Place) -> list[Context | None] | None:
        """The contexts of all requests of ``session`` at ``places``; None: there are none.

        ``own``: the place of the request that asks. Others there that are not decided will have the same context as
        this one, and are not counted.
        """
        found: list[Context | None] = []
        has_spoken = False
        for place in places:
            contexts = self._asked.get((session, place))
            if contexts is not None:
                found += contexts
                has_spoken = True
            elif place != own and (session, place) in self._deciding:
                has_spoken = True
        return found if has_spoken else None


def _count_down(counts: dict[Key, int], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
