"""The life of a connection: its client leaves, or does not take its answer, and the server is shut down."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from core.servers import on_both_loops
from deadlines import until
from http_.conversations import SOON_S, WireClient, alone, body_of, connected, respond, watch_server
from slime_http.asgi import Message, Receive, Scope, Send
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def hang_up(client: WireClient) -> None:
    client.raw.close()


def reset(client: WireClient) -> None:
    client.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.raw.close()


def half_close(client: WireClient) -> None:
    client.raw.shutdown(socket.SHUT_WR)


# What the application is told.


@pytest.mark.parametrize("leave", [hang_up, reset, half_close])
@pytest.mark.parametrize(
    "sent", [GET % b"", POST % (b"", 4), (POST % (b"", 4)) + b"ab"], ids=["GET", "head", "half"]
)
async def test_an_application_learns_that_its_client_has_gone(
    leave: Callable[[WireClient], None], sent: bytes
) -> None:
    told: list[Message] = []
    begun, done = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while not told or told[-1]["type"] != "http.disconnect":
            told.append(await receive())
        told.append(await receive())
        await respond(send, b"for nobody")  # which does nothing
        done.set()

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(sent)
        with anyio.fail_after(SOON_S):
            await begun.wait()
            await anyio.sleep(0.02)
            leave(client)
            await done.wait()
    assert [message["type"] for message in told][-2:] == ["http.disconnect"] * 2
    assert all(message.get("more_body", True) is (sent[:1] == b"P") for message in told[:-2])


async def test_two_may_wait_for_the_client_at_once() -> None:
    """The body goes to one of them, the news that the client has gone to both."""
    told: list[str] = []
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def wait(more: bool) -> None:
            message = await receive()
            told.append(message["type"])
            if message["type"] == "http.request" and more:
                await wait(more)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, True)
            tasks.start_soon(wait, True)
        done.set()

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(POST % (b"", 4), b"a", b"b", b"cd", b"")
        await until(lambda: "http.request" in told)
        hang_up(client)
        with anyio.fail_after(SOON_S):
            await done.wait()
    assert told[-2:] == ["http.disconnect"] * 2
    assert 1 <= told.count("http.request") <= 4


async def test_behind_its_answer_an_application_is_told_to_stop() -> None:
    told: list[Message] = []
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            told.append(await receive())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)  # it waits before the answer is there
            await anyio.sleep(0.01)
            await respond(send, b"ok")
        told.append(await receive())
        done.set()

    async with serving(alone(app)) as url, connected(url) as client:
        for _ in range(2):
            done.clear()
            await client.say(POST % (b"", 2))
            assert (await client.answer()).body == b"ok"
            with anyio.fail_after(SOON_S):
                await done.wait()
            await client.say(b"{}")
    assert [message["type"] for message in told] == ["http.disconnect"] * 4


async def test_a_body_waits_for_its_application_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    seen = watch_server(monkeypatch)
    pieces: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        more = True
        while more:
            message = await receive()
            pieces.append(len(message["body"]))
            more = message["more_body"]
        await respond(send, b"ok")

    size = 32 << 20
    async with serving(alone(app)) as url, connected(url) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.say, (POST % (b"", size)) + bytes(size))
        await until(lambda: bool(seen.connections) and not seen.connections[0].transport.is_reading())
        await anyio.sleep(0.02)
        go_on.set()
        assert (await client.answer()).body == b"ok"
    assert sum(pieces) == size
    assert max(pieces) < 1 << 20


# A client that does not take its answer.


async def fill(receive: Receive, send: Send) -> None:
    """Send until the client takes no more, and the transport holds as much as it should."""
    flow = receive.__self__._connection.flow  # type: ignore[attr-defined]  # only the server knows
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not flow.is_full:
        await send({"type": "http.response.body", "body": bytes(64 * 1024), "more_body": True})
        await anyio.sleep(0.001)


@pytest.mark.parametrize("leave", [hang_up, reset])
async def test_a_send_that_waits_ends_when_the_client_goes(leave: Callable[[WireClient], None]) -> None:
    full, done = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await fill(receive, send)
        full.set()
        await send({"type": "http.response.body", "body": b"more", "more_body": True})
        await send({"type": "http.response.body", "body": b"more", "more_body": True})
        done.set()

    async with serving(alone(app)) as url, connected(url, receive_buffer=64 * 1024) as client:
        await client.say(GET % b"")
        with anyio.fail_after(SOON_S):
            await full.wait()
            assert not done.is_set()
            leave(client)
            await done.wait()


async def test_a_send_that_waits_may_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    full = asyncio.Event()
    task: asyncio.Task[None] | None = None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal task
        task = asyncio.current_task()
        await fill(receive, send)
        full.set()
        await send({"type": "http.response.body", "body": b"more"})

    async with serving(alone(app)) as url, connected(url, receive_buffer=64 * 1024) as client:
        await client.say(GET % b"")
        with anyio.fail_after(SOON_S):
            await full.wait()
            assert task is not None
            task.cancel()
            with pytest.raises(EOFError):
                await client.answer()  # what waits for it comes, but no end of it
            await until(lambda: seen.open == 0)


async def test_an_application_that_is_cancelled_gives_a_503() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.sleep(1)

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET % b"")
        assert (await client.answer()).status == 503
        assert await client.rest() == b""


# Shutdown.


async def test_shutdown_closes_what_rests_and_answers_what_has_come() -> None:
    go_on = asyncio.Event()
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        if scope["path"] != "/idle":
            await go_on.wait()
        await respond(send, scope["path"].encode(), await body_of(receive) or b"")

    async with AsyncExitStack() as clients, anyio.create_task_group() as tasks:
        async with serving(alone(app)) as url:
            fresh, idle, half, busy, ahead, late = [
                await clients.enter_async_context(connected(url)) for _ in range(6)
            ]
            await idle.say(GET % b"idle")
            assert (await idle.answer()).body == b"/idle"
            await half.say(b"GET / HT")
            await busy.say(GET % b"busy")
            await ahead.say(GET % b"1", GET % b"2" + GET % b"3")
            await late.say((POST % (b"late", 4)) + b"ab")
            await until(lambda: len(begun) == 4)

            async def look_and_let_go() -> None:
                for client in (fresh, idle, half):
                    assert await client.rest() == b""
                await late.say(b"cd")
                await busy.say(GET % b"never", b"")
                go_on.set()

            tasks.start_soon(look_and_let_go)
        assert sorted(begun) == ["/1", "/2", "/3", "/busy", "/idle", "/late"]
        for client, bodies in ((busy, [b"/busy"]), (ahead, [b"/1", b"/2", b"/3"]), (late, [b"/lateabcd"])):
            for body in bodies:
                answer = await client.answer()
                assert answer.body == body
            assert answer.values(b"connection") == [b"close"]
            assert await client.rest() == b""


async def test_requests_ahead_are_not_begun_past_the_grace_period() -> None:
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        await anyio.sleep_forever()

    async with AsyncExitStack() as clients:
        async with serving(alone(app), grace_s=1) as url:
            client = await clients.enter_async_context(connected(url))
            await client.say(GET % b"1" + GET % b"2")
            await until(lambda: bool(begun))
        assert (await client.answer()).status == 503
        assert await client.rest() == b""
    assert begun == ["/1"]


async def test_a_request_that_is_cut_off_before_it_began_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task would end without a step, and its client wait without end."""
    seen = watch_server(monkeypatch)

    def make_task(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        for connection in seen.connections:
            assert connection.served is not None
            loop.call_soon(connection.served.cut_off)  # before the first step of the task
        return asyncio.Task(coroutine, loop=loop, **options)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is not to begin")

    loop = asyncio.get_running_loop()
    async with serving(alone(app)) as url, connected(url) as client:
        loop.set_task_factory(make_task)
        await client.say(GET % b"1" + GET % b"2")
        assert (await client.answer()).status == 503
        assert await client.rest() == b""
        loop.set_task_factory(None)
        assert not seen.connections[0]._tasks
