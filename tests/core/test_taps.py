"""Taps: watching a reply on its way to the client, without holding it up."""

from __future__ import annotations

import httpx
import pytest

from plugged import Recording, routing, until
from router_core import Exchange, hookimpl
from router_core.types import ASGIApp, Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio


class WatchingTap:
    """A tap that keeps what it saw, and what had reached the client by then."""

    def __init__(self) -> None:
        self.fed: list[bytes] = []
        self.closed: list[bool] = []

    def feed(self, chunk: bytes) -> None:
        self.fed.append(chunk)

    def close(self, complete: bool) -> None:
        self.closed.append(complete)


class Tapping:
    def __init__(self, watch: WatchingTap) -> None:
        self.watch = watch

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.reply.tap(self.watch)


async def test_a_tap_sees_each_piece_before_the_client_and_one_end() -> None:
    watch = WatchingTap()
    async with routing({"tapping": Tapping(watch)}, Recording()) as running:
        got = b""
        async with running.client.stream("GET", "/stream") as answer:
            async for piece in answer.aiter_raw():
                got += piece
                assert b"".join(watch.fed).startswith(got)
        assert got == b"one two three" == b"".join(watch.fed)
        assert len(watch.fed) > 1, "it was a stream"
        assert watch.closed == [True]


async def test_a_tap_sees_a_whole_reply_too() -> None:
    watch = WatchingTap()
    async with routing({"tapping": Tapping(watch)}, Recording()) as running:
        answer = await running.client.get("/")
        assert b"".join(watch.fed) == answer.content
        assert watch.closed == [True]


async def test_a_tap_is_told_when_the_client_leaves_half_way() -> None:
    watch = WatchingTap()
    endless = Recording(pieces=[b"x" * 1000] * 1000)
    async with routing({"tapping": Tapping(watch)}, endless) as running:
        async with running.client.stream("GET", "/stream") as answer:
            await anext(answer.aiter_raw())
        await until(lambda: bool(watch.closed))
        assert watch.closed == [False]
        assert watch.fed


async def test_a_tap_is_told_when_the_worker_breaks_off() -> None:
    class Breaks(Recording):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != "/torn":
                await super().__call__(scope, receive, send)
                return
            head = [(b"content-length", b"10")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})
            # Returning here, without the other half, makes uvicorn close the connection.

    watch = WatchingTap()
    async with routing({"tapping": Tapping(watch)}, Breaks()) as running:
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.get("/torn")
        assert (watch.fed, watch.closed) == ([b"12345"], [False])


async def test_a_tap_that_fails_breaks_the_reply_instead_of_ending_it() -> None:
    class Fails(WatchingTap):
        def close(self, complete: bool) -> None:
            super().close(complete)
            raise ValueError("of its own")

    watch = Fails()
    async with routing({"tapping": Tapping(watch)}, Recording()) as running:
        with pytest.raises(httpx.RemoteProtocolError):
            await running.client.get("/stream")
        assert watch.closed == [True]


@pytest.mark.parametrize("fails_at", [b"one ", b"two "])
async def test_tap_that_fails_on_a_piece_keeps_it_from_the_client(fails_at: bytes) -> None:
    class Fails(WatchingTap):
        def feed(self, chunk: bytes) -> None:
            super().feed(chunk)
            if chunk == fails_at:
                raise ValueError("of its own")

    watch, got = Fails(), bytearray()

    async def read(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/stream") as answer:
            async for piece in answer.aiter_raw():
                got.extend(piece)

    async with routing({"tapping": Tapping(watch)}, Recording()) as running:
        with pytest.raises(httpx.RemoteProtocolError):
            await read(running.client)
        assert got == b"one two three".partition(fails_at)[0]
        assert (b"".join(watch.fed), watch.closed) == (bytes(got) + fails_at, [False])


class Copying:
    """Middleware that keeps the body that is sent through it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    @hookimpl
    def asgi_middleware(self, app: ASGIApp) -> ASGIApp:
        async def copying(scope: Scope, receive: Receive, send: Send) -> None:
            async def copy(message: Message) -> None:
                self.sent.append(message.get("body", b""))
                await send(message)

            await app(scope, receive, copy if scope["type"] == "http" else send)

        return copying


async def test_middleware_sees_each_piece_of_a_stream() -> None:
    watch, copying = WatchingTap(), Copying()
    async with routing({"tapping": Tapping(watch), "copying": copying}, Recording()) as running:
        answer = await running.client.get("/stream")
        assert answer.content == b"one two three" == b"".join(copying.sent) == b"".join(watch.fed)
