"""Tells clients the time to the first byte: an ASGI middleware class that needs no installation."""

from __future__ import annotations

import time

from router_core.router import Router
from router_core.types import ASGIApp, Message, Receive, Scope, Send


class FirstByte:
    """Adds the time to the first byte to each answer. As in slime, its arguments are the application and the router."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_ms = (time.perf_counter() - began) * 1000
                timing = b"router;dur=%.1f" % took_ms
                message["headers"] = [*message["headers"], (b"server-timing", timing)]
            await send(message)

        await self.app(scope, receive, stamped)
