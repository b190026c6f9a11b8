"""Log of refused requests, with few lines for a client that tries again and again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from router_core.errors import HTTPError
from router_core.types import Scope

__all__ = ["Refusals"]

logger = logging.getLogger(__name__)

#: Seconds between two lines about the same client and reason, and the number of such pairs that are remembered.
_AGAIN_S = 60.0
_MAX_KNOWN = 1024
_MAX_CHARS = 200


class Refusals:
    """Logs refused requests; repetitions within a minute are counted in the next line. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, scope: Scope, refusal: HTTPError, caller: str | None = None) -> None:
        """Log that ``refusal`` answers the request of ``scope``. The line has no header, query or body."""
        host, _ = scope.get("client") or ("?", 0)
        why = str(refusal)[:_MAX_CHARS]
        if caller is not None:
            why = f"{caller[:_MAX_CHARS]}: {why}"
        now = self._clock()
        last, more = self._known.pop((host, why), (-_AGAIN_S, 0))
        if now < last + _AGAIN_S:
            self._known[host, why] = last, more + 1
            return
        if len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[host, why] = now, 0
        path = scope["raw_path"][:_MAX_CHARS].decode("latin-1")
        again = f" ({more} more like this since the last line)" if more else ""
        logger.warning(
            "refused %s %s from %s (%d): %s%s", scope["method"], path, host, refusal.status, why, again
        )
