"""The component that this plugin offers to others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from slime_logging.waits import Wait

__all__ = ["RequestLog"]


class RequestLog(Protocol):
    """Facts about the request that the current task answers; the component ``"request_log"``.

    With ``--access-log`` it is registered before the ``setup`` of other plugins, otherwise not at all.
    """

    def authenticated(self, name: str) -> None:
        """Note the name of the caller; never a key."""
        ...

    def waiting(self, why: Wait) -> AbstractContextManager[None]:
        """Add the duration of the block to the time that the request has waited."""
        ...
