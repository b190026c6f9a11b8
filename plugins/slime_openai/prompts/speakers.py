"""Places in conversations at which sessions have sent requests, and the contexts that these requests continued.

In a History, a place is the key of a conversation, and a context is a turn; None: the request continues no turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["Speakers"]

#: Of the ended requests that made no turn, at most this many are remembered.
_REMEMBERED = 16_384
#: A place in a conversation.
Place = bytes
Context = TypeVar("Context", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Speakers(Generic[Context]):
    """Requests by session and place, each with the context that it continues. A lookup is O(places).

    A request that is :meth:`deciding` has a place, but no context yet.
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
        """End an added request. If it made no turn, remember it; if too many are remembered, forget the oldest one.

        Return the session of the forgotten request, if there is one.
        """
        if self._asked[session, place][context] > 1:  # its turn, or an equal request, was added, too
            self.remove(session, place, context)
            return None
        self._left.append((session, place, context))
        if len(self._left) <= _REMEMBERED:
            return None
        oldest = self._left.popleft()
        self.remove(*oldest)
        return oldest[0]

    def deciding(self, session: str, place: Place) -> Callable[[], None]:
        """Note that ``session`` asks at ``place``. The caller calls the returned function when the context is known."""
        at = (session, place)
        self._deciding[at] = self._deciding.get(at, 0) + 1
        return lambda: _count_down(self._deciding, at)

    def contexts(self, session: str, places: Sequence[Place], own: Place) -> list[Context | None] | None:
        """Return the contexts of all requests of ``session`` at ``places``; None without such a request.

        ``own``: the place of the current request. Other undecided requests at this place are not counted: they will get
        the same context as the current one.
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
