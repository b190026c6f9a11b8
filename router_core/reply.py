"""Replies to clients: a whole body, or a stream that plugins may watch, wrap or read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any

import orjson

from router_core.errors import WorkerBroke
from router_core.types import Headers
from slime_http.bodies import BodySource, Tap, source_of

__all__ = ["BodySource", "Reply", "Tap"]

logger = logging.getLogger(__name__)

_JSON = (b"content-type", b"application/json")


class Reply:
    """The reply to the client: whole (``bytes``) or a stream that is passed on as it comes."""

    __slots__ = ("_body", "_ended", "_source", "_taps", "headers", "status")

    def __init__(self, status: int, headers: Headers, body: bytes | BodySource = b"") -> None:
        self.status = status
        self.headers = headers
        self._taps: list[Tap] = []
        self._ended = False
        self._body: bytes | None = body if isinstance(body, bytes) else None
        self._source: BodySource | None = None if isinstance(body, bytes) else source_of(body)

    @classmethod
    def from_json(cls, value: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> Reply:
        """Make a whole JSON reply."""
        return cls(status, [_JSON, *headers], orjson.dumps(value))

    @property
    def body(self) -> bytes | None:
        """The whole body; None while the reply is a stream."""
        return self._body

    def header(self, name: bytes) -> bytes | None:
        """The first value of header ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Return the whole body, and keep it, so that the reply is no stream any more.

        Raises WorkerBroke for a stream of more than ``max_bytes``, and what :meth:`BodySource.read` raises.
        """
        if self._body is None:
            assert self._source is not None  # narrowing: a reply has a body or a source
            whole = BytesIO()  # grows in place; joining a list of pieces would need a second copy
            while piece := await self._source.read():
                whole.write(piece)
                if max_bytes is not None and whole.tell() > max_bytes:
                    raise WorkerBroke(
                        f"a worker's reply is larger than the {max_bytes} bytes that a plugin takes"
                    )
            self._body, self._source = whole.getvalue(), None
        return self._body

    def replace_body(self, body: bytes | BodySource) -> None:
        """Replace the body, and drop ``Content-Length``; ``proxy.relay`` adds the length of a whole body."""
        self.headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        if isinstance(body, bytes):
            self._close_source()
            self._body, self._source = body, None
        else:
            self._body, self._source = None, source_of(body)

    def pass_through(self, wrap: Callable[[BodySource], BodySource]) -> None:
        """Replace a stream by ``wrap(stream)``, whose ``close`` must close the stream. A whole body stays."""
        if self._source is not None:
            self.replace_body(wrap(self._source))

    def tap(self, tap: Tap) -> None:
        """Let ``tap`` watch the bytes that go to the client."""
        _ = tap.feed, tap.close  # a tap without these raises here, where its plugin is known
        self._taps.append(tap)

    async def next_piece(self) -> tuple[bytes, bool]:
        """Return the next piece of the body, after the taps have seen it, and True if it is the last one.

        Raises what :meth:`BodySource.read` raises.
        """
        if (whole := self.whole()) is not None:
            return whole, True
        source = self._source
        assert source is not None  # narrowing: a reply has a body or a source
        piece = await source.read()
        last = source.finished or not piece
        if self._taps:
            self._show(piece, last)
        return piece, last

    async def pump(self, send_now: Callable[[bytes, Iterable[Callable[[bytes], None]]], bool]) -> None:
        """Let the source's ``pump``, if any, give pieces to ``send_now`` until :meth:`next_piece` has to be called."""
        if (pump := getattr(self._source, "pump", None)) is not None:
            feeds = [tap.feed for tap in self._taps]
            await pump(lambda piece: send_now(piece, feeds))

    def whole(self) -> bytes | None:
        """Return the whole body, after the taps have seen it; None while the reply is a stream."""
        if self._taps and self._body is not None:
            self._show(self._body, True)
        return self._body

    def _show(self, piece: bytes, last: bool) -> None:
        if piece:
            for tap in self._taps:
                tap.feed(piece)
        if last:
            self._end(True)

    def _end(self, complete: bool) -> None:
        if not self._ended:
            self._ended = True
            failed: Exception | None = None
            for tap in self._taps:
                try:
                    tap.close(complete)
                except Exception as error:
                    logger.exception("a tap failed at the end of its reply")
                    failed = failed or error
            if failed is not None and complete:
                raise failed  # the last piece is not sent yet: the client must see that the reply broke off

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()

    def close(self) -> None:
        """Close the taps, and discard the rest of a stream. Idempotent."""
        if self._source is not None:
            self._source.close()
        if self._taps:
            self._end(False)
