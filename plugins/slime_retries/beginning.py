"""The beginning of an answer. Until a part of the answer is passed on, the request can be retried.

An engine sends the head of a stream while the request may still be queued. So a stream has begun only when its first
piece is there. An answer with a length is read to its end, unless it is large.
"""

from __future__ import annotations

from collections.abc import Callable

from router_core.reply import BodySource, Reply

__all__ = ["begun"]

#: An answer up to this length is passed on when it is complete. A larger answer is passed on piece by piece.
_AWAITED_BYTES = 1 << 20


class _Begun:
    """A body whose first piece can be awaited."""

    def __init__(self, source: BodySource) -> None:
        self._source = source
        self._first = b""

    async def begin(self) -> None:
        self._first = await self._source.read()

    @property
    def finished(self) -> bool:
        return not self._first and self._source.finished

    async def read(self) -> bytes:
        first, self._first = self._first, b""
        return first or await self._source.read()

    async def pump(self, take: Callable[[bytes], bool]) -> None:
        pump = getattr(self._source, "pump", None)
        if pump is not None and not self._first:
            await pump(take)

    def close(self) -> None:
        self._source.close()


async def begun(reply: Reply) -> None:
    """Wait until enough of ``reply`` is there to pass it on. Raises HTTPError."""
    length = reply.header(b"content-length")
    if length is not None and length.isdigit() and int(length) <= _AWAITED_BYTES:
        await reply.read()
        return
    bodies: list[_Begun] = []

    def wrap(source: BodySource) -> BodySource:
        bodies.append(_Begun(source))
        return bodies[0]

    headers = reply.headers
    reply.pass_through(wrap)
    reply.headers = headers  # pass_through has dropped Content-Length, but the body is the same
    await bodies[0].begin()
