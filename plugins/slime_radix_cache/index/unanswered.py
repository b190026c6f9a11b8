"""Requests without a recorded answer: they still count as requests of their session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from slime_radix_cache.index.segments import Context, Segment

__all__ = ["Request", "Unanswered"]

#: The most requests that are remembered; they take 8 to 18 MB. When there is one more, the oldest is forgotten.
_REMEMBERED = 16_384


class _Beginning(NamedTuple):
    """A byte string that may be the beginning of others: its ``size`` and ``digest``."""

    size: int
    digest: bytes

    @classmethod
    def all_of(cls, data: bytes) -> _Beginning:
        return cls(len(data), blake2b(data, digest_size=16).digest())

    def fits(self, data: bytes) -> bool:
        return len(data) >= self.size and _Beginning.all_of(data[: self.size]) == self


class Request(NamedTuple):
    """A request of ``session`` that continues ``context``.

    ``prompt``: size and digest of the prompt's text. ``ids``: size and digest of the packed ids, or None if unknown.
    """

    session: str
    prompt: _Beginning
    ids: _Beginning | None
    context: Context


class Unanswered:
    """The latest unanswered requests, without repetitions. A request loses its context when the context is evicted."""

    def __init__(self, *, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._requests: OrderedDict[Request, None] = OrderedDict()
        self._by_session: dict[str, dict[Request, None]] = {}
        self._by_segment: dict[Segment, dict[Request, None]] = {}

    def __contains__(self, session: str) -> bool:
        """Return True if a request of ``session`` is remembered."""
        return session in self._by_session

    def sessions(self) -> list[str]:
        """Return the sessions with a remembered request."""
        return list(self._by_session)

    def add(self, session: str, prompt: bytes, ids: bytes | None, context: Context) -> str | None:
        """Remember a request. If the oldest request had to be forgotten for it, return that request's session."""
        packed = _Beginning.all_of(ids) if ids is not None else None
        self._add(Request(session, _Beginning.all_of(prompt), packed, context))
        if len(self._requests) <= self._remembered:
            return None
        oldest = next(iter(self._requests))
        self._remove(oldest)
        return oldest.session

    def contexts(self, session: str, text: bytes, ids: bytes | None) -> Iterator[Context]:
        """Yield the contexts of requests of ``session`` whose prompt is the beginning of ``text`` or ``ids``."""
        for request in self._by_session.get(session, ()):
            if request.prompt.fits(text) or (ids is not None and request.ids and request.ids.fits(ids)):
                yield request.context

    def evicted(self, segment: Segment) -> list[Request]:
        """Drop the evicted ``segment`` from the requests that continued it; return these requests as they were."""
        requests = list(self._by_segment.get(segment, ()))
        for request in requests:
            self._remove(request)
            self._add(request._replace(context=None))
        return requests

    def restored(self, request: Request, segment: Segment) -> None:
        """Undo :meth:`evicted` for ``request``: ``segment`` has the tokens of the evicted segment."""
        without = request._replace(context=None)
        if without in self._requests:
            self._remove(without)
        if request.context is not None:
            self._add(request._replace(context=(segment, request.context[1])))

    def _add(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request)
        self._by_session.setdefault(request.session, {})[request] = None
        if request.context is not None:
            self._by_segment.setdefault(request.context[0], {})[request] = None

    def _remove(self, request: Request) -> None:
        del self._requests[request]
        of_session = self._by_session[request.session]
        del of_session[request]
        if not of_session:
            del self._by_session[request.session]
        if request.context is not None:
            behind = self._by_segment[request.context[0]]
            del behind[request]
            if not behind:
                del self._by_segment[request.context[0]]
