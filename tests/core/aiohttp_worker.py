"""The worker of ``asgi_worker``, on aiohttp's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from core.asgi_worker import EVENTS

__all__ = ["aiohttp_serving"]


class _Worker:
    def __init__(self) -> None:
        self._allowed = 0

    async def seen(self, request: web.Request) -> web.Response:
        headers = [
            [name.decode("latin-1").lower(), value.decode("latin-1")] for name, value in request.raw_headers
        ]
        return web.json_response(
            {
                "method": request.method,
                "target": request.raw_path,
                "headers": headers,
                "body_bytes": len(await request.read()),
            }
        )

    async def peer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")[1]))

    async def echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def chunked(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 50_000):
            await response.write(body[start : start + 50_000])
        return response

    async def status(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        body = None if number in (204, 304) else b'{"error": {"message": "no"}}'
        return web.Response(body=body, status=number, headers={"x-status": "s"})

    async def twice(self, _: web.Request) -> web.Response:
        response = web.Response(body=b"twice")
        for name, value in [("set-cookie", "a=1; Path=/"), ("x-a", "first"), ("set-cookie", "b=2, 3")]:
            response.headers.add(name, value)
        response.headers.add("x-a", "second")
        return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        self._allowed = 0
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(EVENTS):
            while self._allowed <= number:  # noqa: ASYNC110  # a flag is all that this needs
                await asyncio.sleep(0.002)
            await response.write(event)
        return response

    async def next_event(self, _: web.Request) -> web.Response:
        self._allowed += 1
        return web.Response()


@asynccontextmanager
async def aiohttp_serving(keepalive_s: float = 60) -> AsyncIterator[str]:
    """The worker on a free port; the value is its base URL. It closes connections idle for ``keepalive_s``."""
    worker = _Worker()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/events", worker.events)
    app.router.add_get("/next", worker.next_event)
    app.router.add_get("/peer", worker.peer)
    app.router.add_route("*", "/echo", worker.echo)
    app.router.add_route("*", "/chunked", worker.chunked)
    app.router.add_route("*", "/status/{number}", worker.status)
    app.router.add_get("/twice", worker.twice)
    app.router.add_route("*", "/{path:.*}", worker.seen)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=keepalive_s, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
