"""When a stream has begun: with its first piece, not with its head.

An engine sends the head of a stream as soon as it has taken the request, which may wait long for its turn. As long as
nothing of it was passed on, a stream can be asked for again.
"""

from __future__ import annotations

from router_core.exchange import BodySource, Reply

__all__ = ["begun", "is_stream"]


class _Begun:
    """A body whose first piece is there."""

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

    def close(self) -> None:
        self._source.close()


def is_stream(reply: Reply) -> bool:
    """True for a stream of events of unknown length."""
    kind = reply.header(b"content-type")
    return (
        kind is not None and kind.startswith(b"text/event-stream") and reply.header(b"content-length") is None
    )


async def begun(reply: Reply) -> None:
    """Return when the first piece of ``reply``, a stream, is there. Raises HTTPError."""
    bodies: list[_Begun] = []

    def wrap(source: BodySource) -> BodySource:
        bodies.append(_Begun(source))
        return bodies[0]

    reply.pass_through(wrap)
    await bodies[0].begin()
