"""Expect: 100-continue. A client that waits for it is told once, in its turn, and only to go on with a wanted body."""

from __future__ import annotations

import asyncio

import pytest

from core.servers import on_both_loops
from http_.conversations import alone, body_of, connected, respond
from slime_http.asgi import Receive, Scope, Send
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
EXPECTANT = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue\r\nContent-Length: 4\r\n\r\n"


@alone
async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the body, or at once at ``/early``."""
    if scope["path"] == "/early":
        await respond(send, b"early")
        return
    body = await body_of(receive)
    if body is not None:
        await respond(send, scope["raw_path"], b" ", body)


async def test_a_client_that_waits_is_told_to_continue_once() -> None:
    async with serving(echo) as url, connected(url) as client:
        for _ in range(2):
            await client.say(EXPECTANT % b"")
            answer = await client.answer()
            assert (answer.status, answer.headers) == (100, [])
            await client.say(b"ab", b"cd")
            assert (await client.answer()).body.endswith(b" abcd")


async def test_a_client_whose_body_is_there_is_not_told_to_continue() -> None:
    for body in (b"abcd", b"ab"):
        async with serving(echo) as url, connected(url) as client:
            await client.say((EXPECTANT % b"") + body, b"abcd"[len(body) :])
            assert (await client.answer()).body.endswith(b" abcd")


async def test_a_refused_client_is_not_told_to_continue() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 413,
                "headers": [(b"content-length", b"3"), (b"connection", b"close")],
            }
        )
        await send({"type": "http.response.body", "body": b"big", "more_body": True})
        while (await receive()).get("more_body"):  # what it sends in spite of that
            pass
        await send({"type": "http.response.body"})

    for body in (b"", b"abcd"):
        async with serving(alone(app)) as url, connected(url) as client:
            await client.say(EXPECTANT % b"")
            answer = await client.answer()
            assert (answer.status, answer.body) == (413, b"big")
            await client.say(body)
            if body:
                assert await client.rest() == b""


async def test_a_client_behind_another_request_waits_for_its_turn() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await go_on.wait()
        await respond(send, await body_of(receive) or b"slow")

    async with serving(alone(app)) as url, connected(url) as client:
        await client.say(GET % b"slow" + EXPECTANT % b"")
        assert await client.is_left_waiting(0.05)
        go_on.set()
        assert (await client.answer()).body == b"slow"
        assert (await client.answer()).status == 100
        await client.say(b"abcd")
        assert (await client.answer()).body == b"abcd"


async def test_an_http_1_0_client_is_not_told_to_continue() -> None:
    async with serving(echo) as url, connected(url) as client:
        await client.say((EXPECTANT % b"").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert await client.is_left_waiting(0.05)
        await client.say(b"abcd")
        assert (await client.answer()).body.endswith(b" abcd")


async def test_an_early_answer_closes_when_a_body_may_never_come() -> None:
    """A client that was not told to continue may leave its body out: its next request would be taken for it."""
    async with serving(echo) as url:
        async with connected(url) as client:
            await client.say(EXPECTANT % b"early")
            answer = await client.answer()
            assert (answer.body, answer.values(b"connection")) == (b"early", [b"close"])
            assert await client.rest() == b""
        async with connected(url) as client:
            await client.say((EXPECTANT % b"early") + b"abcd" + GET % b"next")
            assert (await client.answer()).values(b"connection") == []
            assert (await client.answer()).body.startswith(b"/next")
