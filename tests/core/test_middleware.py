"""ASGI middleware of slime's form around the byte path."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from core.servers import Wire, answer, scripted
from router_core.router import Router
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from routers import Start

pytestmark = pytest.mark.anyio

BARE = "--no-default-plugins"


class Accountant:
    """Keeps books of each reply, and takes its time for it when the client has everything."""

    def __init__(self, app: ASGIApp, *, router: Router) -> None:
        self.app = app
        router.components.register("accountant", self)
        self.booked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await asyncio.sleep(0.05)
                self.booked += 1

        await self.app(scope, receive, watched if scope["type"] == "http" else send)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_work_behind_the_last_piece_is_not_cut_short_as_if_the_client_had_gone(
    start: Start, framing: str
) -> None:
    async def slow(wire: Wire) -> None:
        while await wire.request():
            await anyio.sleep(0.05)  # long enough for the router to watch the client
            if framing == "length":
                await wire.send(answer(b"hello"))
            else:
                await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
                await anyio.sleep(0.02)
                await wire.send(b"0\r\n\r\n")

    path = f"{__name__}.Accountant"
    async with (
        scripted(slow) as worker,
        start(BARE, "--worker-urls", worker.url, "--middleware-paths", path) as running,
    ):
        accountant = running.router.components.get("accountant")
        for number in range(1, 4):
            assert (await running.client.get("/")).content == b"hello"
            with anyio.fail_after(1):
                while accountant.booked < number:  # noqa: ASYNC110  # it tells nobody
                    await anyio.sleep(0.005)
