"""Answers whose rows are read from memory or from the store while they are sent."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router_core.errors import HTTPError
from slime_rows.body_pieces import BodyLength, Data, Piece, RowPiece, joined
from slime_rows.rows import Rows
from slime_rows.side_tasks import side_tasks

if TYPE_CHECKING:
    from slime_sglang.token_arrays import IntArray

__all__ = ["StreamedAnswer", "answer_with"]

logger = logging.getLogger(__name__)

#: Nothing is sent before this many bytes of rows are encoded. Until then, an error can become a status code.
_HELD_BYTES = 1 << 20
_T = TypeVar("_T")


class Run(Protocol):
    """Runs work in a thread."""

    def __call__(self, work: Callable[[], _T], /) -> Awaitable[_T]: ...


async def answer_with(
    rows: Sequence[Rows], encode: Callable[[], Iterator[Piece]], media_type: str, run: Run,
    pause: Callable[[], Awaitable[None]], *, is_long: bool,
) -> Response:  # fmt: skip
    """Return an answer with ``rows``, which is streamed if some are known. For the arguments see StreamedAnswer."""
    if any(each.found is not None for each in rows):
        return StreamedAnswer(rows, encode, media_type, run, pause, is_long=is_long)
    body = await run(lambda: joined(encode())) if is_long else joined(encode())
    return Response(body, media_type=media_type)


class StreamedAnswer(Response):
    """Sends the pieces that ``encode`` makes. Holds at most a few MiB of rows besides those that are in memory anyway.

    ``rows``: all rows of the answer. The store does not delete them until the answer ends. If rows turn out to be lost
    before anything is sent, ``encode`` is called again, and the answer has the reason instead. If they turn out to be
    lost later, the answer breaks off: the client sees that it is incomplete, and its next request gets the reason.
    ``is_long``: the pieces other than rows take long to make, so ``run`` makes them. ``pause``: lets other tasks run.
    """

    def __init__(
        self, rows: Sequence[Rows], encode: Callable[[], Iterator[Piece]], media_type: str, run: Run,
        pause: Callable[[], Awaitable[None]], *, is_long: bool,
    ) -> None:  # fmt: skip
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._rows = rows
        self._encode = encode
        self._run = run
        self._pause = pause
        self._is_long = is_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises HTTPError if it cannot be begun."""
        with ExitStack() as held:
            for rows in self._rows:
                if rows.found is not None:
                    held.enter_context(rows.found.held())
            await _until_disconnect(receive, lambda: self._answer(send))

    async def _answer(self, send: Send) -> None:
        for rows in self._rows:
            if rows.found is not None and (reason := await rows.found.check()) is not None:
                rows.lose(reason)
        while True:
            body = _Body(send, self.status_code, self.raw_headers)
            try:
                lost = await self._send_pieces(body)
            except HTTPError as error:
                if not body.has_begun:
                    raise
                logger.warning("an answer broke off: %s", error)
                return  # the server closes the connection
            if lost is None:
                await body.end()
                return
            rows, reason = lost
            if body.has_begun:
                logger.warning("an answer broke off: its %s are %s", rows.name, reason)
                return
            rows.lose(reason)

    async def _send_pieces(self, body: _Body) -> tuple[Rows, str] | None:
        """Write the answer to ``body``. If rows are lost, stop there, and return them and the reason, else None."""
        pieces = self._encode()
        while (piece := await self._next(pieces)) is not None:
            if isinstance(piece, RowPiece):
                assert piece.rows.found is not None  # narrowing: a row piece has rows
                lost = await piece.rows.found.stream(lambda rows: self._send_rows(rows, piece, body))
                if lost is not None:
                    return piece.rows, lost
            elif isinstance(piece, BodyLength):
                body.length = piece
            else:
                await body.add(piece)
        return None

    async def _send_rows(self, rows: IntArray, place: RowPiece, body: _Body) -> None:
        for data in place.encode(rows):  # each step takes 1 ms at most
            await body.add_rows(data)
            await self._pause()

    async def _next(self, pieces: Iterator[Piece]) -> Piece | None:
        return await self._run(lambda: next(pieces, None)) if self._is_long else next(pieces, None)


class _Body:
    """The body of one answer. Nothing is sent until there are enough rows, or until the end.

    ``length``: the number of bytes of the body; None if not known. If nothing is sent before the end, the length is
    known then.
    """

    def __init__(self, send: Send, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.has_begun = False
        self.length: int | None = None
        self._send = send
        self._start = {"type": "http.response.start", "status": status}
        self._headers = list(headers)
        self._waiting: list[Data] = []
        self._row_bytes = 0

    async def add(self, data: Data) -> None:
        """Add ``data``: keep it, or send it if the body has begun."""
        if self.has_begun:
            await self._send_body(data)
        else:
            self._waiting.append(data)

    async def add_rows(self, data: Data) -> None:
        """Add encoded rows. Once the body has begun, wait until the client has taken most of what was added."""
        await self.add(data)
        self._row_bytes += len(data)
        if not self.has_begun and self._row_bytes >= _HELD_BYTES:
            await self._begin()
            waiting, self._waiting = self._waiting, []
            for piece in waiting:
                await self._send_body(piece)

    async def end(self) -> None:
        """Send what is left of the body, and end it."""
        last = b"".join(self._waiting)
        if not self.has_begun:
            if self.length is None:
                self.length = len(last)
            await self._begin()
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self) -> None:
        self.has_begun = True
        if self.length is not None:  # the server refuses a body of any other length
            self._headers.append((b"content-length", b"%d" % self.length))
        await self._send({**self._start, "headers": self._headers})

    async def _send_body(self, data: Data) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Call ``work``, and cancel it when the client has gone. Raises the errors of ``work``."""

    async def watch() -> None:
        message: Any = await receive()
        while message.get("more_body"):  # the request has a body that nobody reads
            message = await receive()
        if message["type"] != "http.disconnect":
            message = await receive()
        if message["type"] == "http.disconnect":
            tasks.cancel_scope.cancel()

    async with side_tasks() as tasks:
        tasks.start_soon(watch)
        await work()
