"""Unanswered requests that continued demoted segments. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from slime_radix_cache.index.unanswered import Request

__all__ = ["AskedRequests"]


class AskedRequests:
    """Unanswered requests by the serial of the demoted segment that they continued, and these serials by session."""

    def __init__(self) -> None:
        self._requests: dict[int, list[Request]] = {}
        self._sessions: dict[str, set[int]] = {}

    def of(self, session: str) -> Iterable[int]:
        """Return the serials of the demoted segments that unanswered requests of ``session`` continued."""
        return self._sessions.get(session, ())

    def add(self, serial: int, requests: list[Request]) -> None:
        """Add ``requests`` that continued the segment with ``serial``."""
        if requests:
            self._requests[serial] = requests
            for request in requests:
                self._sessions.setdefault(request.session, set()).add(serial)

    def take(self, serial: int) -> list[Request]:
        """Remove the requests that continued the segment with ``serial``, and return them."""
        requests = self._requests.pop(serial, [])
        for session in {request.session for request in requests}:
            serials = self._sessions[session]
            serials.remove(serial)
            if not serials:
                del self._sessions[session]
        return requests
