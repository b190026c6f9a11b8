"""The contract of the proxy, and of plugins that stand around it: choose a worker, and ask it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["Dispatcher"]


class Dispatcher(Protocol):
    """Gives an exchange to a worker; ``router.dispatcher``, which is the proxy, or what a plugin has put around it."""

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> Worker:
        """Lease a worker to ``exchange``, none ``but`` these; returns it, of a data-parallel rank the server.

        Raises NoWorker.
        """
        ...

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Ask what ``exchange`` has leased, once; ``exchange.worker`` is who answered, or failed. Raises HTTPError.

        ``body``, if it is to get another one than the request's.
        """
        ...
