"""Events that a worker sends together reach the client together."""

from __future__ import annotations

import socket
import struct
import sys

import anyio
import pytest

from core.servers import Wire, scripted
from http_.conversations import connected
from routers import BARE, Start

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts segments"),
    # The loop that serves: asyncio's own writes each piece at once.
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"]),
]

EVENTS = 16
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ASKED = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
#: The field ``tcpi_data_segs_in`` of Linux's ``tcp_info``.
SEGMENTS_WITH_DATA = struct.Struct("=152xI")


def segments(raw: socket.socket) -> int:
    """The number of TCP segments with data that have come: one for each write of up to 64 KiB."""
    info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SEGMENTS_WITH_DATA.size)
    [number] = SEGMENTS_WITH_DATA.unpack(info)
    return int(number)


async def test_events_that_come_together_are_one_write(start: Start) -> None:
    go_on = anyio.Event()
    event = b"data: x\n\n"

    async def stream(wire: Wire) -> None:
        while await wire.request():
            await wire.send(HEAD + b"%x\r\n%b\r\n" % (len(event), event))
            await go_on.wait()
            await wire.send((b"%x\r\n%b\r\n" % (len(event), event)) * EVENTS + b"0\r\n\r\n")

    async with (
        scripted(stream) as worker,
        start(*BARE, "--worker-urls", worker.url) as running,
        connected(running.url) as client,
    ):
        while running.router.pool.healthy == 0:  # noqa: ASYNC110  # the worker registers
            await anyio.sleep(0.005)
        await client.say(ASKED)
        heard = b""
        while not heard.endswith(event + b"\r\n"):
            heard += await client.receive()
        before = segments(client.raw)
        go_on.set()
        while not heard.endswith(b"0\r\n\r\n"):
            heard += await client.receive()
        assert heard.count(event) == 1 + EVENTS
        assert segments(client.raw) - before <= 2  # the end of the stream may be one of its own
