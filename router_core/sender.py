"""The contract of the proxy, and of plugins that stand around it: choose a worker, and ask it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["Sender"]


class Sender(Protocol):
    """Gets requests answered by workers: the proxy, or a layer around an inner one, see the hook ``sender``.

    Each request is given to ``choose`` and then, without an await in between, to ``send``.
    """

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Lease a worker to ``exchange``, none ``but`` these servers; it is ``exchange.worker`` then. Raises NoWorker.

        A layer that asks several workers, one after the other, may leave this to ``send``.
        """
        ...

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Ask what ``exchange`` has leased; ``exchange.worker`` is who answered, or failed. Raises HTTPError.

        ``body``, if it is to get another one than the request's.
        """
        ...
