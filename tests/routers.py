"""Routers and workers on real sockets, for tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core.types import ASGIApp
from slime_testing import Running

__all__ = ["BARE", "Start", "answering"]

#: Only ``auth``, which decides who may register a worker, and ``sglang``, which reads the properties of a worker.
BARE = ("--no-default-plugins", "--plugin", "auth", "--plugin", "sglang")


def answering(body: bytes, status: int = 200) -> ASGIApp:
    """Return a worker that answers every request with ``body`` and ``status``."""

    async def app(request: Request) -> Response:
        return Response(body, status)

    return Starlette(routes=[Route("/{path:path}", app, methods=["GET", "POST"])])


Start = Callable[..., AbstractAsyncContextManager[Running]]
