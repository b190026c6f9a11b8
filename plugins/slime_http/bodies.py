"""The bodies of replies: their sources, and the taps that watch them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["BodySource", "Tap", "source_of"]


class BodySource(Protocol):
    """The source of a streamed reply's bytes."""

    @property
    def finished(self) -> bool:
        """True once :meth:`read` has returned the last piece."""
        ...

    async def read(self) -> bytes:
        """Return the next piece, or ``b""`` at the end. Raises HTTPError when the worker breaks off."""
        ...

    def close(self) -> None:
        """Discard the rest of the stream. Idempotent."""
        ...


class Tap(Protocol):
    """Watches a reply's bytes on their way to the client."""

    def feed(self, chunk: bytes) -> None:
        """Called with each piece before the client gets it."""
        ...

    def close(self, complete: bool) -> None:
        """Called once, however the reply ends; ``complete`` is False when the body did not come to its end."""
        ...


def source_of(body: BodySource) -> BodySource:
    """Return ``body``. Raises TypeError when it is not the source of a stream."""
    if not hasattr(body, "read"):
        raise TypeError(f"the body of a reply is a {type(body).__name__}; wanted bytes, or a BodySource")
    return body
