"""The application of a router, for servers that import it. The variable ``FLAGS`` has its command line."""

from __future__ import annotations

import asyncio
import os

from router_core.cli import build
from slime_http.asgi import ASGIApp, Receive, Scope, Send

__all__ = ["app", "make_router_app"]


def make_router_app(*flags: str) -> ASGIApp:
    """A router with the command line ``flags`` that tells the number of its tasks at ``/tasks``."""
    _, routed = build(flags)

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/tasks":
            await routed(scope, receive, send)
            return
        told = b"%d" % len(asyncio.all_tasks())
        length = (b"content-length", b"%d" % len(told))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": told})

    return counted


app = make_router_app(*os.environ.get("FLAGS", "--no-default-plugins").split())
