"""For the tests of the byte path: servers that follow a script byte by byte, a client that sends bytes, two loops."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import h11
import pytest
from anyio.abc import AnyByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSStream

from own_time import OWN_TIME, OWN_TIME_UVLOOP
from slime_http.serving import bind

__all__ = [
    "Arrived",
    "Script",
    "Scripted",
    "Wire",
    "answer",
    "content",
    "dial",
    "on_both_loops",
    "on_uvloop",
    "scripted",
    "talk",
]

_UVLOOP = pytest.param(OWN_TIME_UVLOOP, id="uvloop")
#: uvloop, which serves, and asyncio's own: transports differ in more than speed.
on_both_loops = pytest.mark.parametrize("anyio_backend", [pytest.param(OWN_TIME, id="asyncio"), _UVLOOP])
#: The loop that serves, for tests that take long.
on_uvloop = pytest.mark.parametrize("anyio_backend", [_UVLOOP])

_BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


@dataclass(frozen=True)
class Arrived:
    """One request as it stood on the wire; header names in lower case."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        """All values of header ``name``."""
        return [value for key, value in self.headers if key == name]


class Wire:
    """One connection, seen by the script that serves it.

    The router's probes are answered here, so that scripts see traffic only.
    """

    def __init__(self, stream: AnyByteStream, server: Scripted) -> None:
        self._stream = stream
        self._server = server
        self._buffer = b""

    async def head(self) -> Arrived | None:
        """The next request's line and headers; None when the peer has hung up."""
        while True:
            while b"\r\n\r\n" not in self._buffer:
                try:
                    self._buffer += await self._stream.receive()
                except _BROKEN:
                    return None
            head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
            line, *fields = head.split(b"\r\n")
            if line.startswith((b"GET /model_info ", b"GET /health ")):
                self._server.probed += 1
                await self.send(answer(b"{}"))
                continue
            self._server.carrying.add(self)
            pairs = [field.split(b": ", 1) for field in fields]
            return Arrived(line, [(name.lower(), value) for name, value in pairs], b"")

    async def request(self) -> Arrived | None:
        """The next whole request (with a Content-Length, or none); None when the peer has hung up."""
        head = await self.head()
        if head is None:
            return None
        length = int(b"".join(head.values(b"content-length")) or b"0")
        pieces = [self._buffer]
        size = len(self._buffer)
        while size < length:
            try:
                piece = await self._stream.receive()
            except _BROKEN:
                return None
            pieces.append(piece)
            size += len(piece)
        received = b"".join(pieces)
        self._buffer = received[length:]
        request = Arrived(head.line, head.headers, received[:length])
        self._server.arrived.append(request)
        return request

    async def receive(self, most: int) -> bytes:
        """Some bytes of a body that :meth:`head` left unread, at least one; ``b""`` when the peer has hung up."""
        if not self._buffer:
            try:
                self._buffer = await self._stream.receive()
            except _BROKEN:
                return b""
        piece, self._buffer = self._buffer[:most], self._buffer[most:]
        return piece

    async def send(self, data: bytes) -> bool:
        """Send ``data`` and wait while the peer is slow; False when it has hung up."""
        try:
            await self._stream.send(data)
        except _BROKEN:
            return False
        return True

    async def until_closed(self) -> None:
        """Return when the peer has closed the connection; what it sent until then is thrown away."""
        try:
            while True:
                await self._stream.receive()
        except _BROKEN:
            return

    async def end(self) -> None:
        """Close the sending half: nothing more will come."""
        await self._stream.send_eof()

    def reset(self) -> None:
        """Let the close that follows be a TCP reset."""
        raw: socket.socket = self._stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def cut(self) -> None:
        """Close a TLS connection without the closing alert, as an attacker on the wire would."""
        assert isinstance(self._stream, TLSStream)
        await self._stream.transport_stream.aclose()

    def buffers(self, size: int) -> None:
        """Make the kernel keep no more than about ``size`` bytes each way."""
        raw: socket.socket = self._stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


Script = Callable[[Wire], Awaitable[None]]


@dataclass
class Scripted:
    """A server that follows a script; what it has seen so far."""

    url: str
    arrived: list[Arrived] = field(default_factory=list)
    probed: int = 0
    carrying: set[Wire] = field(default_factory=set)
    closed: set[Wire] = field(default_factory=set)

    @property
    def accepted(self) -> int:
        """The number of connections that have carried a request so far."""
        return len(self.carrying)

    @property
    def open(self) -> int:
        """The number of those connections that are not closed."""
        return len(self.carrying - self.closed)


@asynccontextmanager
async def scripted(
    script: Script, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Scripted]:
    """Serve each connection by a run of ``script``; it is closed when the script returns."""
    loop = asyncio.get_running_loop()

    async def serve(raw: socket.socket) -> None:
        stream: AnyByteStream = await SocketStream.from_socket(raw)
        if tls is not None:
            try:
                stream = await TLSStream.wrap(stream, server_side=True, ssl_context=tls)
            except (*_BROKEN, ssl.SSLError):
                await stream.aclose()
                return
        wire = Wire(stream, server)
        try:
            async with stream:
                await script(wire)
        except (*_BROKEN, ssl.SSLError):
            pass  # closing TLS politely is not always granted
        finally:
            server.closed.add(wire)

    with bind("127.0.0.1", port) as listener:
        server = Scripted(f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}")
        async with anyio.create_task_group() as tasks:

            def accept() -> None:
                with suppress(BlockingIOError, ConnectionAbortedError):
                    raw, _ = listener.accept()
                    raw.setblocking(False)
                    tasks.start_soon(serve, raw)

            # Not sock_accept: cancelled at the end, it now and then keeps uvloop from closing.
            loop.add_reader(listener, accept)
            try:
                yield server
            finally:
                loop.remove_reader(listener)
                tasks.cancel_scope.cancel()


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """A reply with a Content-Length."""
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def dial(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A plain non-blocking TCP connection to the server at ``url``."""
    host, _, port = url.partition("://")[2].rpartition(":")
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    return raw


async def talk(url: str, data: bytes) -> bytes:
    """Send ``data`` on a new connection; everything that comes back until the server closes it."""
    loop = asyncio.get_running_loop()
    with await dial(url) as raw:
        await loop.sock_sendall(raw, data)
        pieces = []
        try:
            while piece := await loop.sock_recv(raw, 1 << 16):
                pieces.append(piece)
        except ConnectionResetError:
            pass
        return b"".join(pieces)


def content(reply: bytes) -> bytes:
    """The body of a reply that :func:`talk` returned. Raises ValueError unless it is whole."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x"), ("Connection", "close")]))
    client.send(h11.EndOfMessage())
    client.receive_data(reply)
    client.receive_data(b"")
    pieces = []
    try:
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                pieces.append(event.data)
    except h11.RemoteProtocolError as error:
        raise ValueError(str(error)) from error
    return b"".join(pieces)
