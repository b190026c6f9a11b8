"""A client with small, regular requests, and a client with expensive ones."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import cast
from urllib.parse import urlsplit

import anyio
import httptools

__all__ = ["Hostile", "Waits", "patient"]

#: Time between two requests on each connection.
_TICK_NS = 4_000_000
_CONNECTIONS = 2
_DEADLINE_S = 60.0
_PIECE = 1 << 20
_JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class Waits:
    """Waiting times of requests, and the number of failed ones."""

    waits_ns: list[int] = field(default_factory=list)
    faults: int = 0

    def clear(self) -> None:
        self.waits_ns.clear()
        self.faults = 0

    def answered(self, sent_ns: int, now_ns: int) -> None:
        """Add the wait for an answer, and the waits of the requests that were due before it came."""
        self.waits_ns.extend(range(now_ns - sent_ns, 0, -_TICK_NS))


class _Connection(asyncio.Protocol):
    """The same request, every ``_TICK_NS``. After a late answer, the next request leaves at the next tick."""

    def __init__(self, request: bytes, waits: Waits) -> None:
        self._request = request
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._sent_ns = 0  # 0: no request waits for its answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass it
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._count_wait()

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    def end(self) -> None:
        """Close the connection. If its request is late, count the wait so far."""
        if monotonic_ns() - self._sent_ns > _TICK_NS:
            self._count_wait()
        self._sent_ns = 0
        self._transport.abort()

    def _count_wait(self) -> None:
        if self._sent_ns:
            self._waits.answered(self._sent_ns, monotonic_ns())
            self._sent_ns = 0

    def _ask(self) -> None:
        self._sent_ns = monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        rest_ns = _TICK_NS - (monotonic_ns() - self._sent_ns) % _TICK_NS
        self._count_wait()
        self._waits.faults += self._parser.get_status_code() != 200
        self._timer = self._loop.call_later(rest_ns / 1e9, self._ask)


@asynccontextmanager
async def patient(url: str, body: bytes) -> AsyncIterator[Waits]:
    """POST ``body`` to ``/generate`` every two milliseconds over two keep-alive connections, while the block runs."""
    address = urlsplit(url)
    waits = Waits()
    request = (
        b"POST /generate HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (address.netloc.encode(), len(body), body)
    )
    loop = asyncio.get_running_loop()
    connections: list[_Connection] = []
    try:
        for _ in range(_CONNECTIONS):
            _, connection = await loop.create_connection(
                lambda: _Connection(request, waits), address.hostname or "", address.port or 80
            )
            connections.append(connection)
            await anyio.sleep(_TICK_NS / _CONNECTIONS / 1e9)
        yield waits
        waits.faults += sum(connection.is_closed for connection in connections)
    finally:
        for connection in connections:
            connection.end()


@dataclass(slots=True)
class Hostile:
    """Results of the expensive client: number of answers, status of the last one (0: none), seconds of each request."""

    answers: int = 0
    status: int = 0
    seconds: list[float] = field(default_factory=list)

    def ask(self, url: str, path: str, body: bytes, seconds: float) -> None:
        """POST ``body`` until ``seconds`` have passed, each time on a new connection; at least once.

        This call blocks. Make it in a thread, so that the event loop of the other client runs meanwhile.
        """
        address = urlsplit(url)
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            sent = time.monotonic()
            self.status = _status(address.hostname or "", address.port or 80, path, body)
            self.seconds.append(time.monotonic() - sent)
            self.answers += self.status != 0


def _status(host: str, port: int, path: str, body: bytes) -> int:
    """Return the status of the answer, which is read to its end.

    Returns 0 if there is no answer, or if it breaks off or pauses for a minute.
    """
    connection = http.client.HTTPConnection(host, port, timeout=_DEADLINE_S)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the body may be refused before it is read
            connection.request("POST", path, body, _JSON)
        answer = connection.getresponse()
        while answer.read(_PIECE):
            pass
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
