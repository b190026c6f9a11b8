"""The client's side of a request: its body, and noticing that it has gone."""

from __future__ import annotations

import asyncio
from types import TracebackType

from router_core.errors import BadRequest, PayloadTooLarge
from router_core.types import Headers, Receive

__all__ = ["ClientGone", "cancelled_when_gone", "read_body"]


#: Seconds after which a request is watched for a client that hangs up.
_PATIENCE_S = 0.05


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises PayloadTooLarge and ClientGone."""
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                raise BadRequest(f"wanted a number as Content-Length, got {value[:40]!r}")
            if int(value) > max_bytes:
                raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return b"".join((*pieces, piece)) if pieces else _checked(piece, max_bytes)
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)


def _checked(piece: bytes, max_bytes: int) -> bytes:
    if len(piece) > max_bytes:
        raise _too_large(max_bytes)
    return piece


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes (--max-payload-size)")


class cancelled_when_gone:  # reads as a phrase, like anyio.fail_after
    """``with cancelled_when_gone(receive, loop):`` cancels the block when the client hangs up, and ends quietly.

    The request's body must have been read. ``loop`` is the running one; asking asyncio for it costs a system call.
    """

    __slots__ = ("_gone", "_loop", "_over", "_receive", "_task", "_timer", "_watch")

    def __init__(self, receive: Receive, loop: asyncio.AbstractEventLoop) -> None:
        self._receive = receive
        self._loop = loop
        self._gone = self._over = False
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None  # narrowing: this is async code
        self._task = task
        # Most of what is proxied ends before a client could lose patience; for these no task is made.
        self._timer = self._loop.call_later(_PATIENCE_S, self._begin)

    def _begin(self) -> None:
        # A task group would cost a third of the throughput. This task ends within a step of __exit__.
        self._watch = self._loop.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._gone = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._over = True
        self._timer.cancel()
        if kind is not None and self._watch is not None:
            # After a whole reply the server ends receive() by itself. A cancelled task leaves cycles behind,
            # which under load kept the garbage collector busy for a twentieth of the time.
            self._watch.cancel()
        if self._gone:
            # The cancellation may have been asked for without having arrived; either way it ends here,
            # unless somebody else wants the task to end as well.
            return self._task.uncancel() == 0 and kind is asyncio.CancelledError
        return False
