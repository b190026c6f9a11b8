"""Download of one large answer, as fast as a client can read."""

from __future__ import annotations

import asyncio
import re
from time import perf_counter
from urllib.parse import urlsplit

__all__ = ["download"]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_BUFFER_BYTES = 1 << 20
_DEADLINE_S = 60.0


async def download(url: str, body: bytes, expected: bytes | None = None) -> tuple[int, float]:
    """POST ``body`` to ``/generate``. Returns the size of the answer's body, and the seconds until its last byte.

    The answer must have status 200 and a Content-Length, and its body must equal ``expected`` if that is given. Raises
    OSError for any other answer and for one that breaks off, and TimeoutError after a minute.
    """
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    sink = _Sink(loop.create_future(), expected)
    transport, _ = await loop.create_connection(lambda: sink, address.hostname or "", address.port or 80)
    try:
        started = perf_counter()
        transport.write(
            b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(_DEADLINE_S):
            size = await sink.done
        return size, perf_counter() - started
    finally:
        transport.abort()


class _Sink(asyncio.BufferedProtocol):
    """Counts and compares bytes without keeping them.

    The bytes come into one buffer. The buffer is compared when it is full or has the last byte.
    """

    def __init__(self, done: asyncio.Future[int], expected: bytes | None) -> None:
        self.done = done
        self._expected = memoryview(expected) if expected is not None else None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._filled = 0
        self._size = -1
        self._compared = 0  # bytes of the body before those in the buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._size < 0:
            head, end, body = bytes(self._buffer[: self._filled]).partition(b"\r\n\r\n")
            if not end and self._filled < _BUFFER_BYTES:
                return None  # the head is incomplete
            match = _LENGTH.search(head + b"\r\n")
            if match is None or b" 200 " not in head[:16]:
                return self._fail(f"not an answer of known length: {head[:200]!r}")
            self._size, self._filled = int(match[1]), len(body)
            self._buffer[: len(body)] = body
        is_whole = self._compared + self._filled == self._size
        if is_whole or self._filled == _BUFFER_BYTES:
            self._compare()
        if is_whole and not self.done.done():
            self.done.set_result(self._size)
        return None

    def _compare(self) -> None:
        start, end = self._compared, self._compared + self._filled
        if self._expected is not None:
            # The bytearray is on the left, since a memoryview there would be compared byte by byte.
            came = self._buffer if self._filled == _BUFFER_BYTES else self._buffer[: self._filled]
            if came != self._expected[start:end]:
                self._fail(f"the answer differs from the expected one in its bytes {start} to {end}")
        self._compared, self._filled = end, 0

    def connection_lost(self, exc: Exception | None) -> None:
        missing = self._size - self._compared - self._filled
        place = "in its head" if self._size < 0 else f"{missing} bytes before its end"
        self._fail(f"the answer broke off, {place}")

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(OSError(message))
