"""Buffer of a worker's reply, between its connection and its reader."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from slime_http.asgi import Headers
from slime_http.errors import WorkerBroke, WorkerTimeout

__all__ = ["Source", "UpstreamReply"]

#: Bytes of a reply that may wait for the client before reading from the worker pauses.
_HIGH_WATER = 256 * 1024
#: A first piece of at least this many bytes is not joined with later ones.
_LARGE_BYTES = 64 * 1024

OnFailure = Callable[[WorkerBroke | WorkerTimeout | None], None]


class Source(ABC):
    """The interface through which a reply calls its connection."""

    @abstractmethod
    def resume_reply(self) -> None:
        """Resume reading: the client has taken everything that was buffered."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once."""


class UpstreamReply:
    """A worker's reply, whose body comes piece by piece. Hop-by-hop headers are left out.

    ``sized``: the reply has a Content-Length and is no event stream. ``complete``: all of the reply has come.
    ``sent_at``: when the request was sent (loop time).
    """

    __slots__ = (
        "_chunks",
        "_error",
        "_loop",
        "_on_failure",
        "_size",
        "_source",
        "_take",
        "_waiter",
        "complete",
        "headers",
        "sent_at",
        "sized",
        "status",
    )

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.sent_at = loop.time()
        self.headers: Headers = []
        self.complete = self.sized = False
        self._on_failure: OnFailure | None = None
        self._loop = loop
        self._source: Source | None = source
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._error: WorkerBroke | WorkerTimeout | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """True when there is nothing more to read."""
        return self.complete and not self._chunks

    async def read(self) -> bytes:
        """Return what has come since the last call, at least one byte; ``b""`` at the end.

        Returns all pieces joined, or a large first piece alone, since joining would copy it. Raises WorkerBroke or
        WorkerTimeout, but only after all pieces that came before were returned.
        """
        while not self._chunks:
            if self.complete:
                return b""
            await self.news()
        if len(self._chunks[0]) < _LARGE_BYTES:
            data = self.take()
        else:
            data = self._chunks.popleft()
            self._size -= len(data)
        if self._source is not None and not self._chunks:
            self._source.resume_reply()
        return data

    async def pump(self, take: Callable[[bytes], bool]) -> None:
        """Call ``take`` with each piece when it comes; return when :meth:`read` has to be called.

        ``read`` has to be called if pieces wait already, after a piece for which ``take`` returned False, at the end of
        the reply, and after a failure. Raises what ``take`` raises.
        """
        if not self._chunks and not self.complete and self._error is None:
            self._take = take
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._take = None

    def take(self) -> bytes:
        """Return everything that has come since the last call, without waiting."""
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._size = 0
        return data

    def news(self) -> asyncio.Future[None]:
        """Return a future that ends when more of the reply or an error comes. Raises WorkerBroke and WorkerTimeout."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def close(self) -> None:
        """Give up: close the connection at once if anything is still to come. Idempotent."""
        source, self._source = self._source, None
        if source is not None and not self.complete:
            source.abort()
            self._tell(None)
        self._chunks.clear()

    # Called by the connection.

    def start(self, status: int, headers: Headers, *, sized: bool) -> None:
        self.status, self.headers, self.sized = status, headers, sized
        self._wake()

    def put(self, data: bytes) -> bool:
        """Add a piece of the body. Returns True when reading from the worker should pause."""
        if self._take is not None:
            try:
                if self._take(data):
                    return False
            except Exception as error:
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_exception(error)
            self._take = None
        self._chunks.append(data)
        self._size += len(data)
        if self._waiter is not None:
            self._wake()
        return self._size > _HIGH_WATER

    def end(self) -> None:
        self.complete = True
        self._source = None
        if self._waiter is not None:
            self._wake()

    def fail(self, error: WorkerBroke | WorkerTimeout) -> None:
        self._error = error
        self._source = None
        self._wake()
        self._tell(error)

    def _tell(self, error: WorkerBroke | WorkerTimeout | None) -> None:
        on_failure, self._on_failure = self._on_failure, None
        if on_failure is not None:
            on_failure(error)

    def watch(self, on_failure: OnFailure) -> None:
        """Call ``on_failure`` if the reply does not complete: with the error, or None when it was closed early."""
        self._on_failure = on_failure
        if self._error is not None:  # the read that brought the head also brought a protocol error
            self._tell(self._error)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
