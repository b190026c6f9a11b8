"""Sessions that ``POST /sessions`` created, and sessions that were deleted."""

from __future__ import annotations

import secrets
from collections import OrderedDict

__all__ = ["CreatedSessions"]

#: How many names of open sessions, and how many of deleted ones, are remembered. The least recent are forgotten.
_MAX_NAMES = 262_144


class CreatedSessions:
    """Names of open and of deleted sessions. Their number is bounded, and they are lost when the process ends."""

    def __init__(self, limit: int = _MAX_NAMES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, None] = OrderedDict()
        #: The deleted sessions that are remembered. The values are None.
        self.deleted: OrderedDict[str, None] = OrderedDict()

    def create(self, name: str | None = None) -> str:
        """Open the session ``name``, or a session with a name of 128 random bits. Returns the name."""
        name = name or secrets.token_hex(16)
        self.deleted.pop(name, None)
        self._add(self._open, name)
        return name

    def __contains__(self, name: str) -> bool:
        """Return True when ``name`` was created and not deleted."""
        return name in self._open

    def delete(self, name: str) -> None:
        """Delete ``name``; do nothing if it is not open."""
        if name in self._open:
            del self._open[name]
            self._add(self.deleted, name)

    def _add(self, names: OrderedDict[str, None], name: str) -> None:
        names[name] = None
        names.move_to_end(name)
        if len(names) > self._limit:
            names.popitem(last=False)
