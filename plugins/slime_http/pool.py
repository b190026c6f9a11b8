"""The interface through which connections to a worker call the pool that they belong to."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from slime_http.limits import Limits

if TYPE_CHECKING:
    from slime_http.connection import Connection

__all__ = ["Pool"]


class Pool(ABC):
    """The interface of a connection pool. ``heard_at``: event loop time of the worker's last bytes."""

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
