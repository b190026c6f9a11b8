"""Bodies of clients: limits, framings, and requests that are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import anyio
import pytest

from core.servers import Wire, answer, content, dial, on_both_loops, scripted, talk
from deadlines import HANG_S
from routers import BARE, Start

pytestmark = [pytest.mark.anyio, on_both_loops]

LIMIT = 100_000


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


async def in_pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), size):
        yield body[begin : begin + size]


async def test_a_body_up_to_the_limit_passes_and_a_larger_one_is_a_413(start: Start) -> None:
    flags = ("--max-payload-size", str(LIMIT))
    async with scripted(echo) as worker, start(*BARE, *flags, "--worker-urls", worker.url) as running:
        for size in (0, 1, LIMIT - 1, LIMIT):
            body = bytes(size)
            assert (await running.client.post("/", content=body)).content == body
            assert (await running.client.post("/", content=in_pieces(body, 7000))).content == body
        served = len(worker.arrived)
        for size in (LIMIT + 1, LIMIT + 6999, 20 * LIMIT):
            for upload in (bytes(size), in_pieces(bytes(size), 7000), in_pieces(bytes(size), size - 1)):
                reply = await running.client.post("/", content=upload)
                assert reply.status_code == 413, size
                assert reply.json()["error"]["code"] == "PAYLOAD_TOO_LARGE"
                assert str(LIMIT) in reply.json()["error"]["message"]
        assert len(worker.arrived) == served
        assert [registered.in_flight for registered in running.router.pool] == [0]


async def test_a_chunked_upload_reaches_the_worker_with_a_length(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        raw = (
            b"POST / HTTP/1.1\r\nHost: [::]\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\nConnection: close\r\n\r\n"
            b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nX-T: t\r\n\r\n"
        )
        assert content(await talk(running.url, raw)) == b"hello world"
        [request] = worker.arrived
        assert request.values(b"content-length") == [b"11"]
        assert request.values(b"transfer-encoding") == []
        assert request.values(b"trailer") == []
        assert request.values(b"x-t") == []


async def test_a_client_that_asks_first_is_told_to_go_on(start: Start) -> None:
    loop = asyncio.get_running_loop()
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        with await dial(running.url) as raw, anyio.fail_after(HANG_S):
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
            await loop.sock_sendall(raw, head)
            assert await loop.sock_recv(raw, 1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await loop.sock_sendall(raw, b"hello")
            assert (await loop.sock_recv(raw, 1 << 16)).startswith(b"HTTP/1.1 200 OK")
        assert worker.arrived[0].values(b"expect") == []


async def test_connection_stays_open_when_the_body_comes_before_100_continue(
    start: Start,
) -> None:
    loop = asyncio.get_running_loop()
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        with await dial(running.url) as raw, anyio.fail_after(HANG_S):
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
            for _ in range(2):
                await loop.sock_sendall(raw, head + b"hello")
                reply = await loop.sock_recv(raw, 1 << 16)
                assert reply.startswith(b"HTTP/1.1 200 OK")
                assert b"connection: close" not in reply


REFUSED = {
    "both lengths": b"POST / HTTP/1.1\r\nHost:[::]\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a signed length": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\nhello",
    "a bad chunk": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: a\r\n b\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no path": b"GET HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


async def test_a_request_that_could_be_read_in_two_ways_reaches_no_worker(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for what, raw in REFUSED.items():
            with anyio.fail_after(HANG_S):
                reply = await talk(running.url, raw)
            assert reply.startswith(b"HTTP/1.1 400 "), what
            assert "message" in json.loads(content(reply))["error"], what
        assert worker.arrived == []
        assert (await running.client.post("/", content=b"next")).content == b"next"


TARGETS = {
    b"*": b"OPTIONS",
    b"http://elsewhere:80/path?q=1": b"GET",
    b"//host/path": b"GET",
    b"/%00%ff%zz": b"GET",
    b"/a?b#c": b"GET",
    b"/?": b"GET",
}


async def test_odd_targets_are_answered_and_break_nothing(start: Start) -> None:
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        for target, method in TARGETS.items():
            raw = b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % (method, target)
            with anyio.fail_after(HANG_S):
                reply = await talk(running.url, raw)
            assert reply[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 400"), target
        for request in worker.arrived:
            assert request.values(b"host") == [worker.url.removeprefix("http://").encode()]
        assert (await running.client.post("/", content=b"next")).content == b"next"
