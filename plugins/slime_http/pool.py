"""Interface of the pool of connections to one worker, as a connection sees it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from slime_http.limits import Limits

if TYPE_CHECKING:
    from slime_http.connection import Connection

__all__ = ["Pool"]


class Pool(ABC):
    """The part of a pool that its connections call."""

    url: str
    limits: Limits
    loop: asyncio.AbstractEventLoop
    heard_at: float

    @abstractmethod
    def put_back(self, connection: Connection) -> None:
        """Keep ``connection``, which is free again, for another request."""

    @abstractmethod
    def forget(self, connection: Connection) -> None:
        """Remove ``connection``, which is closed."""
