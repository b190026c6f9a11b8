"""Answers whose rows are read from memory or from the store while they are sent."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router_core.errors import HTTPError
from slime_radix_cache.retrieval.answer import Answer
from slime_radix_cache.retrieval.members import Data, Piece, RowPiece
from slime_radix_cache.retrieval.token_rows import Rows
from slime_sglang.token_arrays import IntArray

__all__ = ["StreamedAnswer", "whole"]

logger = logging.getLogger(__name__)

#: Nothing is sent before so many bytes of rows are encoded: until then, an error is a status code.
_HELD_BYTES = 1 << 20
_T = TypeVar("_T")


class Run(Protocol):
    """Runs work in a thread."""

    def __call__(self, work: Callable[[], _T], /) -> Awaitable[_T]: ...


def whole(pieces: Iterator[Piece]) -> bytes:
    """Return the bytes of ``pieces``, which have no rows."""
    return b"".join(piece for piece in pieces if not isinstance(piece, RowPiece))


class StreamedAnswer(Response):
    """Sends ``answers`` as the pieces that ``encode`` makes of them. At most a few MiB of rows are in memory at once.

    Rows in the store stay there until the end. If rows turn out to be lost before anything is sent, the answer has the
    reason instead. Afterwards, it breaks off: the client sees that it is incomplete, and the next one has the reason.
    ``is_long``: pieces without rows take long; they are made by ``run``. ``pause``: lets others have the event loop.
    """

    def __init__(
        self, encode: Callable[[Sequence[Answer]], Iterator[Piece]], answers: Sequence[Answer], media_type: str,
        run: Run, pause: Callable[[], Awaitable[None]], *, is_long: bool,
    ) -> None:  # fmt: skip
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._encode = encode
        self._answers = answers
        self._run = run
        self._pause = pause
        self._is_long = is_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises HTTPError if it cannot be begun."""
        with ExitStack() as held:
            for answer in self._answers:
                for rows in answer.rows:
                    if rows.found is not None:
                        held.enter_context(rows.found.held())
            await _until_disconnect(receive, lambda: self._answer(send))

    async def _answer(self, send: Send) -> None:
        for answer in self._answers:
            for rows in answer.rows:
                if rows.found is not None and (reason := await rows.found.check()) is not None:
                    self._lose(rows, reason)
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
            if body.has_begun:
                logger.warning("an answer broke off: its %s are %s", lost[0].name, lost[1])
                return
            self._lose(*lost)

    async def _send_pieces(self, body: _Body) -> tuple[Rows, str] | None:
        """Write the answer to ``body``. Returns the rows that are lost, if any, and the reason."""
        pieces = self._encode(self._answers)
        while (piece := await self._next(pieces)) is not None:
            if isinstance(piece, RowPiece):
                assert piece.rows.found is not None  # narrowing: a row piece has rows
                lost = await piece.rows.found.stream(lambda rows: self._send_rows(rows, piece, body))
                if lost is not None:
                    return piece.rows, lost
            else:
                await body.add(piece)
        return None

    async def _send_rows(self, rows: IntArray, place: RowPiece, body: _Body) -> None:
        for data in place.encode(rows):  # each takes 1 ms at most
            await body.add_rows(data)
            await self._pause()

    async def _next(self, pieces: Iterator[Piece]) -> Piece | None:
        return await self._run(lambda: next(pieces, None)) if self._is_long else next(pieces, None)

    def _lose(self, lost: Rows, reason: str) -> None:
        """Let the answer say that the rows ``lost`` are not known."""
        self._answers = [
            replace(
                answer,
                rows=tuple(
                    replace(rows, found=None, reason=reason) if rows is lost else rows for rows in answer.rows
                ),
            )
            for answer in self._answers
        ]


class _Body:
    """The body of one answer. It waits until there are enough rows, or until the end. A short one has a length."""

    def __init__(self, send: Send, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.has_begun = False
        self._send = send
        self._start = {"type": "http.response.start", "status": status}
        self._headers = list(headers)
        self._waiting: list[Data] = []
        self._row_bytes = 0

    async def add(self, data: Data) -> None:
        """Add ``data`` that is no rows."""
        if self.has_begun:
            await self._send_body(data)
        else:
            self._waiting.append(data)

    async def add_rows(self, data: Data) -> None:
        """Add encoded rows, and wait until the client has taken most of what was added."""
        await self.add(data)
        self._row_bytes += len(data)
        if not self.has_begun and self._row_bytes >= _HELD_BYTES:
            await self._begin()
            waiting, self._waiting = self._waiting, []
            for piece in waiting:
                await self._send_body(piece)

    async def end(self) -> None:
        """Send the end."""
        last = b"".join(self._waiting)
        if not self.has_begun:
            self._headers.append((b"content-length", b"%d" % len(last)))
            await self._begin()
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self) -> None:
        self.has_begun = True
        await self._send({**self._start, "headers": self._headers})

    async def _send_body(self, data: Data) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_disconnect(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Call ``work``, and cancel it when the client has gone. Raises its errors."""
    failed: Exception | None = None

    async def watch() -> None:
        message: Any = await receive()
        while message.get("more_body"):  # the request has a body that nobody reads
            message = await receive()
        if message["type"] != "http.disconnect":
            message = await receive()
        if message["type"] == "http.disconnect":
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await work()
        except Exception as error:  # the group would wrap it
            failed = error
        tasks.cancel_scope.cancel()
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # the error's traceback refers to this frame
