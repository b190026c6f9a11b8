"""The time that a client has: a stalled one is cut off in every state, and one that waits for the server never is."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import anyio
import pytest

from core.servers import on_both_loops
from deadlines import until
from http_.conversations import alone, body_of, connected, respond, watch_server
from slime_http.asgi import Receive, Scope, Send
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

TIMEOUT_S = 0.3
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
EXPECTANT = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"


@alone
async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    """Echoes; at ``/slow`` it takes one and a half times as long as a client may, before it looks at the body."""
    if scope["path"] == "/slow":
        await anyio.sleep(1.5 * TIMEOUT_S)
    body = await body_of(receive)
    if body is not None:
        await respond(send, scope["raw_path"], body)


@pytest.mark.parametrize("ahead", [EXPECTANT, POST, (POST % b"%s") + b"ab"], ids=["expect", "head", "half"])
async def test_a_request_ahead_has_its_time_from_its_turn_on(ahead: bytes) -> None:
    async with serving(slow, client_timeout_s=TIMEOUT_S) as url, connected(url) as client:
        await client.say(GET % b"slow" + ahead % b"next")
        assert (await client.answer()).body == b"/slow"
        await anyio.sleep(0.8 * TIMEOUT_S)
        await client.say(b"abcd"[2 * ahead.endswith(b"ab") :])
        if ahead == EXPECTANT:
            assert (await client.answer()).status == 100
        assert (await client.answer()).body == b"/nextabcd"


async def test_a_client_that_awaits_100_does_not_keep_the_server_waiting() -> None:
    async with serving(slow, client_timeout_s=TIMEOUT_S) as url:
        for goes_on in (True, False):
            async with connected(url) as client:
                await client.say(EXPECTANT % b"slow")
                assert (await client.answer()).status == 100
                began = anyio.current_time()
                if goes_on:
                    await anyio.sleep(0.8 * TIMEOUT_S)
                    await client.say(b"abcd")
                    assert (await client.answer()).body == b"/slowabcd"
                else:
                    assert (await client.answer()).status == 408
                    assert anyio.current_time() - began > 0.9 * TIMEOUT_S


async def test_a_connection_rests_behind_a_body_that_came_late() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, scope["raw_path"])

    async with serving(alone(early), client_timeout_s=TIMEOUT_S) as url, connected(url) as client:
        for _ in range(2):
            await client.say(POST % b"early")
            assert (await client.answer()).body == b"/early"
            await client.say(b"ab", b"cd")
            assert await client.is_left_waiting(2 * TIMEOUT_S)
        await client.say(GET[:4], b"")
        await anyio.sleep(0.8 * TIMEOUT_S)
        await client.say(GET[4:] % b"")
        assert (await client.answer()).body == b"/"


@alone
async def leave_some(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends until the transport holds a little that the client does not take, and ends the answer."""
    transport = receive.__self__.transport  # type: ignore[attr-defined]  # only the server knows what the kernel left
    await send({"type": "http.response.start", "status": 200, "headers": []})
    held_for = 0
    while held_for < 20:
        await anyio.sleep(0.002)
        held_for = held_for + 1 if transport.get_write_buffer_size() else 0
        if not held_for:
            await send({"type": "http.response.body", "body": bytes(16 * 1024), "more_body": True})
    await send({"type": "http.response.body"})


async def test_a_half_closed_client_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    async with (
        serving(leave_some, client_timeout_s=TIMEOUT_S) as url,
        connected(url, receive_buffer=64 * 1024) as client,
    ):
        await client.say(GET % b"")
        await until(lambda: bool(seen.connections) and seen.connections[0]._newest is not None)
        await until(lambda: seen.connections[0]._is_idle)
        client.raw.shutdown(socket.SHUT_WR)
        await until(lambda: seen.open == 0)


async def test_shutdown_cuts_off_a_client_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_server(monkeypatch)
    async with AsyncExitStack() as clients:
        async with serving(leave_some, client_timeout_s=TIMEOUT_S, grace_s=1) as url:
            client = await clients.enter_async_context(connected(url, receive_buffer=64 * 1024))
            await client.say(GET % b"")
            await until(lambda: bool(seen.connections) and seen.connections[0]._newest is not None)
            await until(lambda: seen.connections[0]._is_idle)
        assert seen.open == 0
