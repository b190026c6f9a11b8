"""The interface of the proxy, and of plugins' layers around it: choose a worker, and send it a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["Sender"]


class Sender(Protocol):
    """Sends requests to workers: the proxy, or a layer around an inner sender, see the hook ``sender``.

    For each request the router calls ``choose`` and then, without an await in between, ``send``.
    """

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Lease a worker whose server is not in ``but``, and set ``exchange.worker`` to it. Raises NoWorker.

        A layer that may ask several workers, one after the other, may leave the choice to ``send``.
        """
        ...

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Send ``request`` to the leased worker. Afterwards ``exchange.worker`` is the worker that answered or failed.

        ``body``, if given, is sent in place of the request's body. Raises HTTPError.
        """
        ...
