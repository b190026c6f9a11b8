"""A router with plugins that a test has made itself, and workers that record their requests."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deadlines import until
from router_core.app import make_app
from router_core.hooks import new_plugin_manager
from router_core.router import Router
from router_core.settings import Settings
from router_core.types import Receive, Scope, Send
from slime_http.serving import serving
from slime_sglang import SGLang
from slime_testing import Running

__all__ = ["Recording", "routing", "until"]


class Recording:
    """A worker that records its requests. It answers with its name; at the path ``streaming``, it streams ``pieces``.

    With an event ``hold``, answers wait until it is set.
    """

    def __init__(self, name: str = "worker", pieces: Sequence[bytes] = (b"one ", b"two ", b"three")) -> None:
        self.name = name
        self.pieces = pieces
        self.streaming = "/stream"
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.hold: anyio.Event | None = None
        any_path = Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT"])
        self._app = Starlette(routes=[Route("/model_info", self._introduce), any_path])

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of ``requests``."""
        return [body for _, _, body in self.requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _introduce(self, _: Request) -> Response:
        return JSONResponse({})

    async def _answer(self, request: Request) -> Response:
        self.requests.append((request.url.path, dict(request.headers), await request.body()))
        if self.hold is not None:
            await self.hold.wait()
        if request.url.path == self.streaming:
            return StreamingResponse(self._stream())
        return JSONResponse({"worker": self.name})

    async def _stream(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
            await anyio.sleep(0.01)  # so that they arrive one by one


@asynccontextmanager
async def routing(
    plugins: Mapping[str, object], *workers: Recording, options: argparse.Namespace | None = None
) -> AsyncIterator[Running]:
    """Serve a router with ``plugins``, in this order, in front of ``workers``. At the end no lease may be left.

    The router also has the plugin ``sglang``, which reads the properties of each worker.
    """
    manager = new_plugin_manager()
    manager.register(SGLang(), "sglang")
    for name, plugin in plugins.items():
        manager.register(plugin, name)
    router = Router(Settings(), manager, options)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker)) for worker in workers]
        url = await stack.enter_async_context(serving(make_app(router)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=10))
        for worker in urls:
            await router.add_worker(worker)
        yield Running(router, url, client)
        await until(lambda: not any(worker.in_flight for worker in router.pool))
