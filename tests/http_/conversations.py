"""For tests of the server's side: a client that reads answers one by one, and what the server has open and writes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from core.servers import dial
from slime_http.asgi import ASGIApp, Message, Receive, Scope, Send
from slime_http.server_protocol import Protocol
from slime_http.serving import serving

__all__ = [
    "GET",
    "GET_1_0",
    "HEAD",
    "SOON_S",
    "Answer",
    "Seen",
    "WireClient",
    "alone",
    "answering",
    "asked",
    "body_of",
    "connected",
    "respond",
    "watch_server",
]

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = GET.replace(b"GET", b"HEAD")
GET_1_0 = b"GET / HTTP/1.0\r\n\r\n"
#: When something must have happened by, on a busy machine.
SOON_S = 10.0


@dataclass(frozen=True)
class Answer:
    """One answer as it stood on the wire; header names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        """All values of header ``name``."""
        return [value for key, value in self.headers if key == name]


class WireClient:
    """A client that sends bytes and reads the answers in turn."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self._loop = asyncio.get_running_loop()
        self._heard = b""

    async def say(self, *pieces: bytes) -> None:
        """Send ``pieces``; the server reads each by itself."""
        for number, piece in enumerate(pieces):
            for _ in range(3 if number else 0):
                await anyio.lowlevel.checkpoint()  # the server runs in this loop
            await self.send(piece)

    async def answer(self, *, method: str = "GET") -> Answer:
        """The next answer, to a request of this method. Raises EOFError when the server has closed before its end."""
        head = await self._until(b"\r\n\r\n")
        line, *fields = head[:-4].split(b"\r\n")
        pairs = [field.split(b": ", 1) for field in fields]
        answer = Answer(int(line.split(b" ")[1]), [(name.lower(), value) for name, value in pairs], b"")
        if method == "HEAD" or answer.status in (100, 204, 304):
            return answer
        if answer.values(b"transfer-encoding") == [b"chunked"]:
            assert not answer.values(b"content-length")
            body = b""
            while size := int(await self._until(b"\r\n"), 16):
                body += (await self._take(size + 2))[:-2]
            assert await self._take(2) == b"\r\n"
        elif lengths := answer.values(b"content-length"):
            [length] = lengths
            body = await self._take(int(length))
        else:
            body = await self.rest()
        return Answer(answer.status, answer.headers, body)

    async def rest(self) -> bytes:
        """Everything until the server closes. Raises ConnectionResetError."""
        while await self._hear():
            pass
        rest, self._heard = self._heard, b""
        return rest

    async def is_left_waiting(self, seconds: float) -> bool:
        """Return True when nothing comes for so long."""
        with anyio.move_on_after(seconds):
            await self._hear()
            return False
        return not self._heard

    async def _until(self, end: bytes) -> bytes:
        while end not in self._heard:
            if not await self._hear():
                raise EOFError(f"the answer broke off after {self._heard[:200]!r}")
        return await self._take(self._heard.index(end) + len(end))

    async def _take(self, size: int) -> bytes:
        while len(self._heard) < size:
            if not await self._hear():
                raise EOFError(f"the answer broke off after {self._heard[:200]!r}")
        taken, self._heard = self._heard[:size], self._heard[size:]
        return taken

    async def send(self, piece: bytes) -> None:
        """Send ``piece``."""
        await self._loop.sock_sendall(self.raw, piece)

    async def receive(self) -> bytes:
        """Some bytes; ``b""`` when the server has closed."""
        return await self._loop.sock_recv(self.raw, 1 << 18)

    async def _hear(self) -> bool:
        with anyio.fail_after(SOON_S):
            piece = await self.receive()
        self._heard += piece
        return bool(piece)


@asynccontextmanager
async def connected(url: str, *, receive_buffer: int | None = None) -> AsyncIterator[WireClient]:
    """A client with a connection to the server at ``url``."""
    with await dial(url, receive_buffer=receive_buffer) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or pieces would be put together
        yield WireClient(raw)


def alone(app: ASGIApp) -> ASGIApp:
    """``app`` with a lifespan in which nothing happens."""

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await app(scope, receive, send)
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})
        return None

    return whole


async def respond(
    send: Send,
    *parts: Any,
    status: int = 200,
    headers: Iterable[Any] | None = None,
) -> None:
    """Send an answer in ``parts``; without ``headers`` it has a Content-Length."""
    if headers is None:
        headers = [(b"content-length", b"%d" % sum(map(len, parts)))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for number, part in enumerate(parts, 1):
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})
    if not parts:
        await send({"type": "http.response.body"})


def answering(*parts: Any, status: int = 200, headers: Iterable[Any] | None = None) -> ASGIApp:
    """An application that answers everything in these ``parts``."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, *parts, status=status, headers=headers)

    return alone(app)


async def asked(app: ASGIApp, request: bytes = GET) -> tuple[Answer, bool]:
    """The answer to ``request``, and True when the connection stays open for another one."""
    async with serving(app) as url, connected(url) as client:
        await client.say(request)
        answer = await client.answer(method=request.split(b" ")[0].decode())
        if answer.values(b"connection") == [b"close"]:
            assert await client.rest() == b""
            return answer, False
        await client.say(request)
        assert await client.answer(method=request.split(b" ")[0].decode()) == answer
        return answer, True


async def body_of(receive: Receive) -> bytes | None:
    """The body of a request; None when the client has hung up."""
    body = b""
    more = True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        more = message["more_body"]
    return body


@dataclass
class Seen:
    """All connections of servers since :func:`watch_server`, and the pieces written on them."""

    connections: list[Protocol] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)

    @property
    def open(self) -> int:
        """The number of connections that are open."""
        return sum(connection._parser is not None for connection in self.connections)


class _RecordedTransport:
    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written
        self.write = partial(self._record, transport.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def writelines(self, parts: Iterable[bytes]) -> None:
        whole = b"".join(parts)
        self._record(self._transport.write, whole)

    def _record(self, write: Any, data: bytes) -> None:
        self._written.append(data)
        write(data)


def watch_server(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Keep what servers have open, and what they write, from now on."""
    seen = Seen()
    made = Protocol.connection_made

    def connection_made(self: Protocol, transport: asyncio.Transport) -> None:
        seen.connections.append(self)
        made(self, _RecordedTransport(transport, seen.written))  # type: ignore[arg-type]  # it passes all else on

    monkeypatch.setattr(Protocol, "connection_made", connection_made)
    return seen
