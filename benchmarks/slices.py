"""A load in short slices: a number of requests to one server, then the same number to the next server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

__all__ = ["Load", "interval"]

#: Least coverage of the interval that :func:`interval` returns.
_COVERAGE = 0.95
_DEADLINE_S = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Load:
    """Connections to one server, each with one request at a time. All requests are the same.

    Between two slices the connections stay open. Each answer must have status 200 and be as long as the first answer.
    """

    def __init__(self, url: str, body: bytes, connections: int) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._connections = connections
        self._request = (
            b"POST /generate HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (address.netloc.encode(), len(body), body)
        )
        self._open: list[_Connection] = []
        self._left = self._running = 0
        self._done: asyncio.Future[None] | None = None
        self.answer_bytes = 0

    async def run(self, requests: int) -> None:
        """Send ``requests`` requests, and return when all are answered.

        Raises RuntimeError when an answer has another status or length, or a connection is closed. Raises TimeoutError
        after a minute.
        """
        loop = asyncio.get_running_loop()
        while len(self._open) < self._connections:
            _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port)
            self._open.append(connection)
        self._left, self._running, self._done = requests, 0, loop.create_future()
        for connection in self._open:
            self.send(connection)
        async with asyncio.timeout(_DEADLINE_S):
            await self._done

    def close(self) -> None:
        """Close the connections."""
        self._done = None
        for connection in self._open:
            connection.transport.abort()

    def send(self, connection: _Connection) -> None:
        """Send the next request of the slice, if there is one."""
        if self._left:
            self._left -= 1
            self._running += 1
            connection.transport.write(self._request)

    def answered(self, connection: _Connection) -> None:
        """Count an answer, and send the next request of the slice."""
        self._running -= 1
        if self._left:
            self.send(connection)
        elif not self._running and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def failed(self, reason: str) -> None:
        """End the slice with RuntimeError."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(reason))


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, load: Load) -> None:
        self._load = load
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass it

    def data_received(self, data: bytes) -> None:
        got = self._got = self._got + data if self._got else data
        size = self._size()
        if not size or len(got) < size:
            return
        self._got = b""
        wanted = self._load.answer_bytes or size
        if not (len(got) == size == wanted and got.startswith(b"HTTP/1.1 200 ")):
            self._load.failed(f"the server answered {got[:200]!r}")
        else:
            self._load.answer_bytes = size
            self._load.answered(self)

    def _size(self) -> int:
        """Return the size of the answer with its head, in bytes; 0 while its head is incomplete."""
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return 0
        length = _LENGTH.search(self._got, 0, end + 2)
        return end + 4 + (int(length[1]) if length else 0)

    def connection_lost(self, _: Exception | None) -> None:
        self._load.failed("the server closed a connection")


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the confidence interval of the median of ``values``, and its coverage: at least 95 % from six values on.

    The ends of the interval are two of the values, chosen by the binomial distribution. So the coverage holds
    for any distribution of the values.
    """
    ordered, number = sorted(values), len(values)
    ways, outside, skipped = 1, 0.5**number * 2, 0
    while True:
        ways = ways * (number - skipped) // (skipped + 1)
        more = outside + ways * 0.5**number * 2
        if more > 1 - _COVERAGE or skipped + 1 >= number // 2:
            return ordered[skipped], ordered[-1 - skipped], 1 - outside
        outside, skipped = more, skipped + 1
