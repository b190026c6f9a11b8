"""Places in conversations at which sessions have sent requests, and the contexts that these requests continued.

In a History, the place of a request is the key of its messages before the answer. The context of a request is the turn
that the request continues, or None if it continues no turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["Speakers"]

#: Of the requests that ended without a turn, at most this many are remembered.
_REMEMBERED = 16_384
#: A place in a conversation.
Place = bytes
Context = TypeVar("Context", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Speakers(Generic[Context]):
    """Requests by session and place, each with the context that it continues.

    The place of a request is known before its context, see :meth:`deciding`.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[str, Place], dict[Context | None, int]] = {}
        self._deciding: dict[tuple[str, Place], int] = {}
        self._left: deque[tuple[str, Place, Context | None]] = deque()

    def add(self, session: str, place: Place, context: Context | None) -> None:
        """Add a request of ``session`` at ``place`` that continues ``context``."""
        contexts = self._asked.setdefault((session, place), {})
        contexts[context] = contexts.get(context, 0) + 1

    def remove(self, session: str, place: Place, context: Context | None) -> None:
        """Undo one :meth:`add`."""
        contexts = self._asked[session, place]
        _count_down(contexts, context)
        if not contexts:
            del self._asked[session, place]

    def leave(self, session: str, place: Place, context: Context | None) -> str | None:
        """End an added request. Remove it if its turn, or another request with the same three values, was added, too.

        Otherwise remember it. If too many ended requests are then remembered, forget the oldest of them, and return its
        session. Else return None.
        """
        if self._asked[session, place][context] > 1:
            self.remove(session, place, context)
            return None
        self._left.append((session, place, context))
        if len(self._left) <= _REMEMBERED:
            return None
        oldest = self._left.popleft()
        self.remove(*oldest)
        return oldest[0]

    def deciding(self, session: str, place: Place) -> Callable[[], None]:
        """Note that ``session`` asks at ``place``. Call the returned function once, when the context is known."""
        at = (session, place)
        self._deciding[at] = self._deciding.get(at, 0) + 1
        return lambda: _count_down(self._deciding, at)

    def contexts(self, session: str, places: Sequence[Place], own: Place) -> list[Context | None] | None:
        """Return the contexts of all requests of ``session`` at ``places``; None if there is no such request.

        ``own``: the place of the current request. Requests at this place whose context is not known yet do not count:
        they will get the same context as the current request. O(places + returned contexts).
        """
        found: list[Context | None] = []
        has_asked = False
        for place in places:
            contexts = self._asked.get((session, place))
            if contexts is not None:
                found += contexts
                has_asked = True
            elif place != own and (session, place) in self._deciding:
                has_asked = True
        return found if has_asked else None


def _count_down(counts: dict[Key, int], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
