"""A slow side holds the fast one back: what waits in the router is bounded, and everything arrives."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from pathlib import Path

import anyio
import pytest

from core.servers import Wire, content, dial, on_both_loops, scripted
from deadlines import HANG_S
from routers import BARE, Start
from slime_http.connection import Connection
from slime_http.limits import Limits
from slime_http.upstream import Upstream

pytestmark = [pytest.mark.anyio, on_both_loops]

MIB = 1 << 20
SLICE = 256 * 1024
PIECE = bytes(range(256)) * 256  # 64 KiB
SIZE = 24 * MIB


def _grown(kind: str) -> int:
    """Bytes to which the buffer of a socket grows by itself, if the kernel finds that it should."""
    limits = Path("/proc/sys/net/ipv4") / kind
    return int(limits.read_text().split()[2]) if limits.exists() else 8 * MIB


#: The router keeps 512 KiB for a client, a read of 256 KiB more, and the server 64 KiB. The rest is the kernel's: of
#: four sockets' buffers two are made small, and the router's own grow.
BOUND = _grown("tcp_rmem") + _grown("tcp_wmem") + 2 * MIB
FLOOD = (BOUND + 8 * MIB) // len(PIECE) * len(PIECE)


class Flood:
    """A worker that sends FLOOD bytes as fast as it is let."""

    def __init__(self, *, chunked: bool) -> None:
        self.sent = 0
        self.released = asyncio.Event()
        self._chunked = chunked

    async def __call__(self, wire: Wire) -> None:
        if await wire.request() is None:
            return
        wire.buffers(64 * 1024)
        framing = b"Transfer-Encoding: chunked" if self._chunked else b"Content-Length: %d" % FLOOD
        await wire.send(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n" % framing)
        while self.sent < FLOOD:
            framed = b"10000\r\n" + PIECE + b"\r\n" if self._chunked else PIECE
            if not await wire.send(framed):
                return
            self.sent += len(PIECE)
        if self._chunked:
            await wire.send(b"0\r\n\r\n")
        await wire.until_closed()

    async def until_held(self) -> None:
        """Return when nothing more has been taken for a while."""
        before = -1
        while before < self.sent:
            before = self.sent
            await anyio.sleep(0.2)


async def read_all(raw: socket.socket) -> bytes:
    """The body of the answer; the server closes behind it."""
    loop = asyncio.get_running_loop()
    pieces = []
    while piece := await loop.sock_recv(raw, MIB):
        pieces.append(piece)
    return content(b"".join(pieces))


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_slow_client_holds_a_fast_worker_back(start: Start, chunked: bool) -> None:
    flood = Flood(chunked=chunked)
    async with scripted(flood) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        with await dial(running.url, receive_buffer=64 * 1024) as raw:
            await asyncio.get_running_loop().sock_sendall(
                raw, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            with anyio.fail_after(HANG_S):
                await flood.until_held()
            assert 0 < flood.sent < BOUND
            with anyio.fail_after(HANG_S):
                body = await read_all(raw)
            assert flood.sent == FLOOD
            assert body == PIECE * (FLOOD // len(PIECE))


async def test_a_client_that_stalls_is_no_silence_of_the_worker(start: Start) -> None:
    flood = Flood(chunked=False)
    arguments = (*BARE, "--stream-silence-timeout-secs", "0.2")
    async with scripted(flood) as worker, start(*arguments, "--worker-urls", worker.url) as running:
        with await dial(running.url, receive_buffer=64 * 1024) as raw:
            await asyncio.get_running_loop().sock_sendall(
                raw, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            with anyio.fail_after(HANG_S):
                await flood.until_held()
            await anyio.sleep(0.4)
            with anyio.fail_after(HANG_S):
                assert len(await read_all(raw)) == FLOOD


async def test_a_slow_worker_gets_a_large_upload_slice_by_slice() -> None:
    upload = PIECE * (SIZE // len(PIECE))
    reading = asyncio.Event()
    arrived: list[bytes] = []

    async def slow(wire: Wire) -> None:
        wire.buffers(64 * 1024)
        assert await wire.request() is not None
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert await wire.head() is not None
        await reading.wait()
        digest, length = hashlib.sha256(), 0
        while length < SIZE:
            piece = await wire.receive(MIB)
            assert piece
            digest.update(piece)
            length += len(piece)
        arrived.append(digest.digest())
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
        await wire.until_closed()

    async with scripted(slow) as worker:
        upstream = Upstream(worker.url, Limits())
        answers: list[bytes] = []

        async def post() -> None:
            reply = await upstream.request("POST", b"/", [], upload)
            answers.append(await reply.read())

        await upstream.request("GET", b"/", [])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await anyio.sleep(0.3)
            [connection] = upstream._connections
            assert connection._transport is not None
            assert connection._upload is not None  # most of it was not even handed to the transport
            assert connection._transport.get_write_buffer_size() <= 512 * 1024
            reading.set()
        assert answers == [b"done"]
        assert arrived == [hashlib.sha256(upload).digest()]
        upstream.close()


async def test_both_directions_held_at_once_go_on(start: Start) -> None:
    """An echo that answers while it reads, with a client that reads only after it has sent everything."""

    async def echo(wire: Wire) -> None:
        if (head := await wire.head()) is None:
            return
        length = int(head.values(b"content-length")[0])
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
        while length:
            piece = await wire.receive(length)
            length -= len(piece)
            await wire.send(piece)
        await wire.until_closed()

    upload = PIECE * (8 * MIB // len(PIECE))
    async with scripted(echo) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        with await dial(running.url, receive_buffer=64 * 1024) as raw, anyio.fail_after(HANG_S):
            head = (
                b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                % len(upload)
            )
            await asyncio.get_running_loop().sock_sendall(raw, head + upload)
            await anyio.sleep(0.2)
            assert await read_all(raw) == upload


class _Sink(asyncio.Transport):
    """A transport that takes all at once, as the socket of a fast worker does."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self.writes: list[int] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(len(data))

    def abort(self) -> None:
        pass


async def test_between_two_slices_of_an_upload_others_have_the_event_loop() -> None:
    upstream = Upstream("http://127.0.0.1:1", Limits())
    with socket.socket() as end:
        sink, connection = _Sink(end), Connection(upstream)
        connection.connection_made(sink)
        connection.begin("POST", b"head", bytes(3 * SLICE + 1))
        for slices in range(1, 4):
            assert sink.writes == [4] + [SLICE] * slices
            await asyncio.sleep(0)
        assert sink.writes == [4, SLICE, SLICE, SLICE, 1]
    upstream.close()
