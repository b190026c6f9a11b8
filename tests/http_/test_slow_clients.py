"""Clients that keep the router waiting or send without end: answered or cut off, and their workers free again."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from core.servers import Script, Wire, answer, content, dial, on_both_loops, scripted, talk
from deadlines import until
from router_core.cli import build
from router_core.router import Router
from router_core.types import ASGIApp, Receive, Scope, Send
from routers import BARE
from slime_http import serving as serving_module
from slime_http.serving import serving

pytestmark = [pytest.mark.anyio, on_both_loops]

TIMEOUT_S = 0.3
#: When something must have happened by, on a busy machine.
SOON_S = 5.0
MIB = 1 << 20
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@asynccontextmanager
async def before(script: Script) -> AsyncIterator[tuple[Router, str]]:
    """A router with a short patience for clients before one worker, and its URL. At the end no lease may be left."""
    async with scripted(script) as worker:
        flags = ("--client-timeout-secs", str(TIMEOUT_S), "--worker-urls", worker.url)
        router, app = build([*BARE, *flags])
        async with serving(app, client_timeout_s=router.settings.client_timeout_s) as url:
            yield router, url
            await until(lambda: not any(registered.in_flight for registered in router.pool))


async def say(raw: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(raw, data)


async def hear(raw: socket.socket, most: int = MIB) -> bytes:
    with anyio.fail_after(SOON_S):
        return await asyncio.get_running_loop().sock_recv(raw, most)


async def hear_all(raw: socket.socket) -> bytes:
    """Everything until the server closes, or resets what it was not read of."""
    heard = b""
    with suppress(ConnectionResetError):
        while piece := await hear(raw):
            heard += piece
    return heard


def code_of(reply: bytes) -> str:
    """Return the ``code`` in the JSON of an error."""
    code: str = orjson.loads(content(reply))["error"]["code"]
    return code


async def echo(wire: Wire) -> None:
    """Answers with the path, at ``/slow`` after some time."""
    while request := await wire.request():
        if b"/slow" in request.line:
            await anyio.sleep(2 * TIMEOUT_S)
        await wire.send(answer(request.line.split(b" ")[1] + request.body))


def alone(app: ASGIApp) -> ASGIApp:
    """``app`` with a lifespan."""
    return Starlette(routes=[Mount("/", app)])


def flooding(body: bytes) -> ASGIApp:
    """Answers with ``body``, written at once."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    return app


# Clients that do not take their answer.


async def test_a_client_that_takes_nothing_is_cut_off_and_its_worker_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = asyncio.Event()

    async def endless(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while await wire.send(bytes(MIB)):
            pass  # as fast as it is let
        left.set()

    async with before(endless) as (router, url):
        with await dial(url, receive_buffer=64 * 1024) as raw:
            await say(raw, GET % b"")
            await until(lambda: any(worker.in_flight for worker in router.pool))
            with anyio.fail_after(SOON_S):
                await left.wait()
            await until(lambda: router.proxy.open_connections == 0)
            await until(lambda: not any(worker.in_flight for worker in router.pool))
            # The answer that it finds when it looks at last is visibly not whole.
            with pytest.raises(ValueError, match="without sending complete"):
                content(await hear_all(raw))
    [line] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    wanted = r"client 127\.0\.0\.1:\d+: its connection is cut, .* 64 KiB .* \(--client-timeout-secs\)"
    assert re.fullmatch(wanted, line.getMessage())


async def test_a_route_that_streams_to_such_a_client_is_ended_as_well() -> None:
    left = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(MIB)
                await anyio.lowlevel.checkpoint()
        finally:
            left.set()

    async def stream(_: Request) -> Response:
        return StreamingResponse(endless())

    async with serving(Starlette(routes=[Route("/", stream)]), client_timeout_s=TIMEOUT_S) as url:
        with await dial(url, receive_buffer=64 * 1024) as raw:
            await say(raw, GET % b"")
            with anyio.fail_after(SOON_S):
                await left.wait()


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_client_that_takes_a_large_answer_slowly_gets_all_of_it(connection: str) -> None:
    body = bytes(range(256)) * (16 * MIB // 256)  # of which the kernel takes a few MiB
    async with serving(alone(flooding(body)), client_timeout_s=TIMEOUT_S) as url:
        with await dial(url, receive_buffer=64 * 1024) as raw:
            await say(
                raw, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n" % connection.encode()
            )
            began, heard = anyio.current_time(), bytearray()
            while not heard.endswith(body[-256:]) or len(heard) < len(body):
                heard += await hear(raw, 256 * 1024)
                await anyio.sleep(0.01)
            assert anyio.current_time() - began > 2 * TIMEOUT_S
            assert heard.partition(b"\r\n\r\n")[2] == body


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_client_that_takes_a_whole_answer_drop_by_drop_is_cut_off(connection: str) -> None:
    body = bytes(16 * MIB)
    async with serving(alone(flooding(body)), client_timeout_s=TIMEOUT_S) as url:
        with await dial(url, receive_buffer=64 * 1024) as raw:
            await say(
                raw, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n" % connection.encode()
            )
            for _ in range(round(3 * TIMEOUT_S / 0.05)):
                await hear(raw, 1024)
                await anyio.sleep(0.05)
            assert len(await hear_all(raw)) < len(body)


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_client_that_leaves_the_last_bytes_of_its_answer_is_cut_off(
    connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the answer is too little to hold the application back."""
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        transport = receive.__self__.transport  # type: ignore[attr-defined]  # only the server knows what the kernel left
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(16 * 1024), "more_body": True})
            await anyio.sleep(0.001)
        await send({"type": "http.response.body", "body": b"the end"})
        done.set()

    monkeypatch.setattr(serving_module, "_KEEP_ALIVE_S", 0.2)
    async with serving(alone(app), client_timeout_s=TIMEOUT_S, grace_s=SOON_S) as url:
        with await dial(url, receive_buffer=64 * 1024) as raw:
            await say(
                raw, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n\r\n" % connection.encode()
            )
            with anyio.fail_after(SOON_S):
                await done.wait()
            await anyio.sleep(2 * TIMEOUT_S + 0.2)
            assert b"the end" not in await hear_all(raw)


# Clients that do not go on with their request.


@pytest.mark.parametrize(
    "begun",
    [b"G", GET[:-2] % b"", POST % 10, POST % 10 + b"half",
     b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
     b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\nTrailer: "],
    ids=["letter", "head", "no-body", "half-body", "chunk", "trailer"],
)  # fmt: skip
async def test_a_request_that_does_not_go_on_is_a_408(begun: bytes) -> None:
    async with before(echo) as (router, url):
        began = anyio.current_time()
        with anyio.fail_after(SOON_S):
            reply = await talk(url, begun)
        assert anyio.current_time() - began > 0.9 * TIMEOUT_S
        assert reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert code_of(reply) == "HTTP_408"
        assert router.proxy.open_connections == 0


async def test_a_head_that_drips_is_a_408_however_steadily() -> None:
    async with before(echo) as (_, url):
        with await dial(url) as raw:
            began = anyio.current_time()
            await say(raw, (GET % b"")[:-2])

            async def drip() -> None:
                with suppress(ConnectionError):
                    while True:
                        await say(raw, b"a: b\r\n")
                        await anyio.sleep(0.05)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drip)
                assert (await hear(raw)).startswith(b"HTTP/1.1 408 ")
                tasks.cancel_scope.cancel()
            assert 0.9 * TIMEOUT_S < anyio.current_time() - began < SOON_S


async def test_a_body_that_goes_on_may_take_its_time() -> None:
    async with before(echo) as (_, url):
        with await dial(url) as raw:
            await say(raw, POST % 12)
            for _ in range(12):
                await anyio.sleep(TIMEOUT_S / 4)
                await say(raw, b"x")
            assert (await hear(raw)).endswith(b"/" + 12 * b"x")


async def test_a_body_that_nobody_has_read_yet_may_wait() -> None:
    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        # Not much longer: where the kernel has lost word of the room that is made, it asks after 0.2, 0.6 and 1.4 s.
        await anyio.sleep(1.2 * TIMEOUT_S)
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message["body"])
            more = message["more_body"]
        told = b"%d" % size
        length = (b"content-length", b"%d" % len(told))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": told})

    async with serving(alone(busy), client_timeout_s=TIMEOUT_S) as url:
        with await dial(url) as raw, anyio.fail_after(SOON_S):
            await say(raw, POST % (16 * MIB) + bytes(16 * MIB))
            assert content(await hear(raw)) == b"%d" % (16 * MIB)


async def test_pipelined_request_may_stay_half_sent_during_a_slow_answer() -> None:
    async with before(echo) as (_, url):
        with await dial(url) as raw:
            await say(raw, GET % b"slow" + POST % 4 + b"ab")
            first = await hear(raw)
            assert content(first) == b"/slow"
            assert (await hear_all(raw)).startswith(b"HTTP/1.1 408 ")
        with await dial(url) as raw:
            await say(raw, GET % b"slow" + b"GET /next")
            assert content(await hear(raw)) == b"/slow"
            await say(raw, b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert content(await hear_all(raw)) == b"/next"


async def test_a_connection_may_rest_between_requests() -> None:
    async with before(echo) as (_, url):
        with await dial(url) as raw:
            for _ in range(2):
                await say(raw, GET % b"again")
                assert content(await hear(raw)) == b"/again"
                await anyio.sleep(2 * TIMEOUT_S)


async def test_a_connection_on_which_nothing_is_asked_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "_KEEP_ALIVE_S", 0.2)
    async with before(echo) as (_, url):
        with anyio.fail_after(SOON_S):
            assert await talk(url, b"") == b""


async def test_empty_lines_do_not_keep_a_connection() -> None:
    async with before(echo) as (_, url):
        with await dial(url) as raw:
            await say(raw, GET % b"a")
            assert content(await hear(raw)) == b"/a"
            await say(raw, b"\r\n")
            assert await hear(raw) == b""


async def test_a_body_that_stops_when_its_answer_has_begun_gets_no_second_answer() -> None:
    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"2")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        if scope["path"] == "/half":
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            await receive()
            assert (await receive())["type"] == "http.disconnect"
        else:
            await send({"type": "http.response.body", "body": b"ok"})

    async with serving(alone(hasty), client_timeout_s=TIMEOUT_S) as url:
        for path, body in ((b"/", b"ok"), (b"/half", b"o")):
            with anyio.fail_after(SOON_S):
                reply = await talk(url, (POST % 10).replace(b"/", path, 1) + b"half")
            assert reply.count(b"HTTP/1.1 ") == 1
            assert reply.partition(b"\r\n\r\n")[2] == body


async def test_body_that_stops_before_its_answer_begins_is_a_408() -> None:
    """A server keeps the head of an answer until the body begins."""

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(alone(waiting), client_timeout_s=TIMEOUT_S) as url:
        with anyio.fail_after(SOON_S):
            reply = await talk(url, POST % 10 + b"half")
        assert reply.startswith(b"HTTP/1.1 408 ")


# Clients that send too much.


@pytest.mark.parametrize(
    "sent",
    [
        GET % (b"a" * 600_000),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
        b"GET / HTTP/1.1\r\na: " + b"b" * 600_000,
        b"POST / HTTP/1.1\r\nHost: [::]\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"a: b\r\n" * 100_000,
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: " + b"b" * 600_000,
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;a=" + b"b" * 600_000,
    ],
    ids=["request line", "many headers", "long header", "many trailers", "long trailer", "chunk extension"],
)  # fmt: skip
async def test_what_stands_beside_a_body_is_bounded(sent: bytes) -> None:
    async with before(echo) as (_, url):
        with await dial(url) as raw:
            with suppress(ConnectionError):
                await say(raw, sent)
            # It may be reset, because there was more: then nothing is heard, but it is closed.
            assert (await hear_all(raw))[:13] in (b"HTTP/1.1 431 ", b"")


async def test_a_large_body_is_none_of_that() -> None:
    async with before(echo) as (_, url):
        chunks = b"100000\r\n" + bytes(MIB) + b"\r\n"
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        for request in (
            head + b"Transfer-Encoding: chunked\r\n\r\n" + 2 * chunks + b"0\r\n\r\n",
            head + b"Content-Length: %d\r\n\r\n" % (2 * MIB) + bytes(2 * MIB),
        ):
            assert (await talk(url, request)).startswith(b"HTTP/1.1 200 ")


# Clients that send ahead.


@pytest.mark.parametrize(
    "ahead", [GET % b"next", 3 * (GET % b"next"), POST % 3 + b"abc", b"GET /half"],
    ids=["one", "three", "with a body", "half a head"],
)  # fmt: skip
@pytest.mark.parametrize("pause_s", [0.0, 0.2], ids=["at once", "later"])
async def test_a_client_that_sends_ahead_and_hangs_up_ends_what_is_under_way(
    ahead: bytes, pause_s: float
) -> None:
    left = asyncio.Event()

    async def silent(wire: Wire) -> None:
        await wire.request()
        await wire.until_closed()
        left.set()

    async with before(silent) as (router, url):
        with await dial(url) as raw:
            await say(raw, GET % b"")
            await anyio.sleep(pause_s)
            await say(raw, ahead)
            await until(lambda: any(worker.in_flight for worker in router.pool))
            await anyio.sleep(0.05)
        with anyio.fail_after(SOON_S):
            await left.wait()
        await until(lambda: router.proxy.open_connections == 0)


async def test_a_hang_up_ends_a_request_that_has_waited_its_turn() -> None:
    left = asyncio.Event()

    async def second_silent(wire: Wire) -> None:
        while request := await wire.request():
            if b"/second" in request.line:
                await wire.until_closed()
                left.set()
                return
            await wire.send(answer(b"first"))

    async with before(second_silent) as (_, url):
        with await dial(url) as raw:
            await say(raw, GET % b"first" + GET % b"second" + GET % b"third")
            assert content(await hear(raw)) == b"first"
            await anyio.sleep(0.1)
        with anyio.fail_after(SOON_S):
            await left.wait()


async def test_nonsense_behind_a_request_is_not_written_into_its_answer() -> None:
    async def half(wire: Wire) -> None:
        await wire.request()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        await wire.until_closed()

    async with before(half) as (_, url):
        with await dial(url) as raw:
            await say(raw, GET % b"")
            heard = b""
            while not heard.endswith(b"half"):
                heard += await hear(raw)
            await say(raw, b"NONSENSE\r\n\r\n")
            assert await hear_all(raw) == b""


async def test_many_requests_sent_ahead_are_all_answered_in_turn() -> None:
    async with before(echo) as (_, url):
        requests = b"".join(GET % (b"%d" % number) for number in range(100))
        last = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        with anyio.fail_after(SOON_S):
            reply = await talk(url, requests + last)
        bodies = [part.rpartition(b"\r\n\r\n")[2] for part in reply.split(b"HTTP/1.1 200 OK")[1:]]
        assert bodies == [*(b"/%d" % number for number in range(100)), b"/last"]


UPGRADE = (
    b"Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
)


async def test_upgrade_request_is_answered_in_http_and_connection_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with before(echo) as (_, url):
        with anyio.fail_after(SOON_S):
            reply = await talk(url, b"GET /a HTTP/1.1\r\n" + UPGRADE + b"\r\n")
    assert b"\r\nconnection: close\r\n" in reply
    assert content(reply) == b"/a"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("framing", [b"Content-Length: %d", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("pause_s", [0.0, 0.05], ids=["at once", "later"])
async def test_upgrade_request_with_body_is_refused_and_smuggles_nothing(
    framing: bytes, pause_s: float
) -> None:
    """Java's HttpClient sends such, unless it is told to speak HTTP/1.1."""
    arrived: list[bytes] = []

    async def script(wire: Wire) -> None:
        while request := await wire.request():
            arrived.append(request.line)
            await wire.send(answer(b""))

    smuggled = GET % b"smuggled"
    framing = framing.replace(b"%d", b"%d" % len(smuggled))
    async with before(script) as (_, url):
        with await dial(url) as raw:
            await say(
                raw, b"POST /a HTTP/1.1\r\n" + UPGRADE + framing + b"\r\n\r\n" + smuggled * (not pause_s)
            )
            await anyio.sleep(pause_s)
            with suppress(ConnectionError):
                await say(raw, smuggled)
            reply = await hear(raw)
            assert reply.startswith(b"HTTP/1.1 400 ")
            assert b"leave out its Upgrade header" in reply
        await anyio.sleep(0.05)
    assert arrived == []


async def test_a_request_with_nonsense_behind_it_is_not_begun() -> None:
    arrived: list[bytes] = []

    async def script(wire: Wire) -> None:
        while request := await wire.request():
            arrived.append(request.line)
            await wire.send(answer(b""))

    async with before(script) as (_, url):
        with anyio.fail_after(SOON_S):
            reply = await talk(url, GET % b"a" + b"NONSENSE\r\n\r\n")
        assert code_of(reply) == "HTTP_400"
        await anyio.sleep(0.05)
    assert arrived == []
