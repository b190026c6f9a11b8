"""The client's side of a request: read the body, send an error, and detect that the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import chain
from types import TracebackType

import anyio
from starlette.requests import ClientDisconnect

from router_core.errors import BadRequest, HTTPError, PayloadTooLarge, ShuttingDown, error_body
from router_core.exchange import Exchange
from router_core.types import Headers, Receive, Send

__all__ = ["Watch", "Watched", "let_finish", "read_body", "send_error"]

_JSON = (b"content-type", b"application/json")
#: Longest time in seconds before a request is watched for a disconnect.
_PATIENCE_S = 0.05
#: Longest time in seconds for which the rest of a refused request is read and discarded.
_LINGER_S = 2.0
#: Seconds in which an engine can stop and report its sampled tokens, after the client has hung up.
_DISCONNECT_GRACE_S = 2.0


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole request body. Raises BadRequest, PayloadTooLarge and ClientDisconnect."""
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                raise BadRequest(f"wanted a number as Content-Length, got {value[:40]!r}")
            if int(value) > max_bytes:
                raise _too_large(max_bytes)
    pieces = BytesIO()  # its getvalue() makes no copy
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece: bytes = message.get("body", b"")
        if pieces.tell() + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        is_last = not message.get("more_body", False)
        if is_last and not pieces.tell():
            return piece
        pieces.write(piece)
        if is_last:
            return pieces.getvalue()


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {max_bytes} bytes (--max-payload-size)")


async def let_finish(receive: Receive) -> None:
    """Discard the rest of the client's request, for two seconds at most.

    A connection closed with unread bytes is reset, and after a reset the client may not get the answer.
    """
    with anyio.move_on_after(_LINGER_S):
        while (await receive()).get("more_body", False):
            pass


async def send_error(error: HTTPError, send: Send, unread: Receive | None = None) -> None:
    """Answer a request with ``error``. ``unread``: its ``receive``, if the rest of the body must be discarded."""
    body = error_body(error)
    headers = [_JSON, (b"content-length", b"%d" % len(body)), *error.headers]
    if unread is not None or isinstance(error, ShuttingDown):
        headers.append((b"connection", b"close"))  # no further request may use this connection
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await let_finish(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


class Watch:
    """Detects clients that hang up, and cancels the blocks ``with Watched(watch, ...):`` that serve them.

    Before a block is cancelled, ``on_disconnect`` is called. If it returns True, the block has two seconds to end. When
    a block ends, its exchange is closed. Most requests end within milliseconds, so one timer serves all requests. Only
    a request that still runs when the timer fires gets a task. That task waits for the client to hang up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_disconnect: Callable[[Exchange], bool]) -> None:
        self.loop = loop
        self.on_disconnect = on_disconnect
        #: The requests that came since the timer was set, and the requests that have a task.
        self.young: set[Watched] = set()
        self.old: set[Watched] = set()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """The exchanges of the clients' requests in flight, and the exchanges that plugins made for these requests."""
        for watched in chain(self.young, self.old):
            yield from watched.exchange.all_parts()

    def set_timer(self) -> None:
        self.timer = self.loop.call_later(_PATIENCE_S, self._look)

    def _look(self) -> None:
        self.timer = None
        for watched in self.young:
            watched.begin()
        self.old |= self.young
        self.young.clear()


class Watched:
    """One request that ``watch`` watches during a block. Read the whole body from ``receive`` before the block."""

    __slots__ = ("_cancelled", "_grace", "_over", "_receive", "_task", "_waiting", "_watch", "exchange")

    def __init__(self, watch: Watch, receive: Receive, exchange: Exchange) -> None:
        self._watch = watch
        self._receive = receive
        self.exchange = exchange
        self._cancelled = self._over = False
        self._waiting: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None

    def __enter__(self) -> Watched:
        # Without the argument asyncio looks up the loop, which costs a system call.
        task = asyncio.current_task(self._watch.loop)
        assert task is not None  # narrowing: this is async code
        self._task = task
        self._watch.young.add(self)
        if self._watch.timer is None:
            self._watch.set_timer()
        return self

    def end(self) -> None:
        """Stop watching. Call this before the last piece is sent: after that piece ``receive`` reports a disconnect."""
        self._over = True

    def begin(self) -> None:
        # A task group would cost a third of the throughput. The task ends at most one step of the loop after __exit__.
        self._waiting = self._watch.loop.create_task(self._wait())

    async def _wait(self) -> None:
        message = await self._receive()
        # Middleware may replay the body for ever. In that case a client that hangs up is not detected.
        if message["type"] == "http.disconnect" and not self._over:
            if self._watch.on_disconnect(self.exchange):
                self._grace = self._watch.loop.call_later(_DISCONNECT_GRACE_S, self._cancel)
            else:
                self._cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._over = True
        self.exchange.close()
        self._watch.young.discard(self)
        self._watch.old.discard(self)
        if self._grace is not None:
            self._grace.cancel()
        if self._waiting is not None and kind is not None:
            # After a whole reply the server ends receive() by itself, so the task is cancelled only after an error.
            # Cancelled tasks leave reference cycles, whose garbage collection took 5 % of the time under load.
            self._waiting.cancel()
        self._waiting = None  # the task's error refers to this object: the cycle would keep a body alive
        if self._cancelled:
            # Undo this cancellation, even if the block has caught it. The error goes on if other code cancelled, too.
            return self._task.uncancel() == 0 and kind is asyncio.CancelledError
        return False
