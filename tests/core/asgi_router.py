"""The application of a router, for servers that import it: its worker is the one in the variable ``WORKER``."""

from __future__ import annotations

import asyncio
import os

from router_core.cli import build
from routers import BARE
from slime_http.asgi import ASGIApp, Receive, Scope, Send

__all__ = ["app", "make_router_app"]


def make_router_app(worker: str) -> ASGIApp:
    """A router before ``worker`` that tells the number of its tasks at ``/tasks``."""
    _, routed = build([*BARE, "--worker-urls", worker])

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/tasks":
            await routed(scope, receive, send)
            return
        told = b"%d" % len(asyncio.all_tasks())
        length = (b"content-length", b"%d" % len(told))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": told})

    return counted


app = make_router_app(os.environ.get("WORKER", "http://127.0.0.1:1"))
