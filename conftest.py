"""What every test may use: the event loop's kind, and routers on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core.cli import build
from router_core.router import Router
from router_core.serving import serving
from router_core.types import ASGIApp


@dataclass(frozen=True)
class Running:
    """A router that serves: its object, its base URL, and a client of it."""

    router: Router
    url: str
    client: httpx.AsyncClient


def answering(body: bytes, status: int = 200) -> ASGIApp:
    """A worker that answers everything with ``body``."""

    async def app(request: Request) -> Response:
        return Response(body, status)

    return Starlette(routes=[Route("/{path:path}", app, methods=["GET", "POST"])])


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def start() -> Start:
    """``async with start("--plugin", ...) as running:`` serves a router on a free port, as its command line would."""

    @asynccontextmanager
    async def started(*arguments: str, grace_s: float = 5.0) -> AsyncIterator[Running]:
        router, app = build(arguments)
        async with (
            serving(app, grace_s=grace_s) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
        ):
            yield Running(router, url, client)

    return started
