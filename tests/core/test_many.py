"""A thousand requests at once, bytes against bytes: half of them streams, a tenth hanging up half way."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import anyio
import pytest

from core.servers import Wire, answer, content, on_uvloop, scripted
from deadlines import HANG_S
from routers import BARE, Start

pytestmark = [pytest.mark.anyio, on_uvloop]

REQUESTS = 1000
EVENTS = 12


def event(number: int, place: int) -> bytes:
    return b"data: %d of %d\n\n" % (place, number)


async def worker(wire: Wire) -> None:
    """Answers with what it was asked, in a while."""
    while request := await wire.request():
        number = int(request.body)
        if number % 2:
            await anyio.sleep(0.3)
            await wire.send(answer(request.body * 50))
            continue
        await wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for place in range(EVENTS):
            await anyio.sleep(0.03)
            data = event(number, place)
            await wire.send(b"%x\r\n%s\r\n" % (len(data), data))
        await wire.send(b"0\r\n\r\n")


async def ask(url: str, number: int) -> bytes | None:
    """The answer's body; None for a client that hangs up half way."""
    leaves = number % 20 < 2
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    try:
        body = b"%d" % number
        head = (
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        received = b""
        if leaves and number % 2:
            await anyio.sleep(0.15)
            return None
        while piece := await reader.read(1 << 16):
            received += piece
            if leaves and received.count(b"data: ") >= EVENTS // 2:
                return None
        return content(received)
    finally:
        writer.transport.abort()


async def test_a_thousand_requests_at_once_leave_nothing_behind(start: Start) -> None:
    found: dict[int, bytes | None] = {}
    before = asyncio.all_tasks()
    leaving = [number for number in range(REQUESTS) if number % 20 < 2]
    async with (
        scripted(worker) as first,
        scripted(worker) as second,
        start(*BARE, "--worker-urls", first.url, second.url) as running,
    ):

        async def one(number: int) -> None:
            found[number] = await ask(running.url, number)

        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                for number in range(REQUESTS):
                    tasks.start_soon(one, number)
        for number in range(REQUESTS):
            whole = b"%d" % number * 50
            stream = b"".join(event(number, place) for place in range(EVENTS))
            expected = None if number in leaving else whole if number % 2 else stream
            assert found[number] == expected, number
        with anyio.fail_after(HANG_S):
            while any(registered.in_flight for registered in running.router.pool):  # noqa: ASYNC110  # no event
                await anyio.sleep(0.005)
        assert running.router.proxy.busy_connections == 0
        assert min(len(first.arrived), len(second.arrived)) > REQUESTS // 4  # both had work
    assert asyncio.all_tasks() == before
