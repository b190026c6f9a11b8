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


async def download(url: str, body: bytes) -> tuple[int, float]:
    """POST ``body`` to ``/generate``. Returns the size of the answer's body, and the seconds until its last byte.

    The answer must have a Content-Length. Raises OSError when it breaks off, TimeoutError after a minute.
    """
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    sink = _Sink(loop.create_future())
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
    """Counts bytes without keeping them: one buffer, no objects."""

    def __init__(self, done: asyncio.Future[int]) -> None:
        self.done = done
        self._buffer = bytearray(_BUFFER_BYTES)
        self._size = self._missing = -1

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._size < 0:
            head, _, body = bytes(self._buffer[:nbytes]).partition(b"\r\n\r\n")
            match = _LENGTH.search(head + b"\r\n")
            if match is None or b" 200 " not in head[:16]:
                return self._fail(f"not an answer of known length: {head[:200]!r}")
            self._size = int(match[1])
            self._missing = self._size - len(body)
        else:
            self._missing -= nbytes
        if self._missing == 0 and not self.done.done():
            self.done.set_result(self._size)
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the answer broke off, {self._missing} bytes before its end")

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(OSError(message))
