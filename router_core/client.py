"""The client's side of a request: its body, errors told to it, and noticing that it has gone."""

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

__all__ = ["Watch", "let_finish", "read_body", "send_error"]

_JSON = (b"content-type", b"application/json")
#: A request that takes longer, in seconds, is watched for a client that hangs up.
_PATIENCE_S = 0.05
#: Seconds that a client may go on sending what nobody wants.
_LINGER_S = 2.0
#: Seconds that an engine has to stop, and to tell what it had sampled, when its client has gone.
_DISCONNECT_GRACE_S = 2.0


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises PayloadTooLarge and ClientDisconnect."""
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                raise BadRequest(f"wanted a number as Content-Length, got {value[:40]!r}")
            if int(value) > max_bytes:
                raise _too_large(max_bytes)
    pieces = BytesIO()  # it makes no copy of what was written
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
    """Throw away what the client still sends of its request, for two seconds at most.

    A connection that is closed on unread bytes is reset, and a reset overtakes the answer that explains it.
    """
    with anyio.move_on_after(_LINGER_S):
        while (await receive()).get("more_body", False):
            pass


async def send_error(error: HTTPError, send: Send, unread: Receive | None = None) -> None:
    """Answer a request by ``error``; ``unread``: its body was not read, and is not wanted."""
    body = error_body(error)
    headers = [_JSON, (b"content-length", b"%d" % len(body)), *error.headers]
    if unread is not None or isinstance(error, ShuttingDown):
        headers.append((b"connection", b"close"))  # the rest of the body is not wanted, nor another request
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await let_finish(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


class Watch:
    """Notices clients that hang up: ``with watch.cancelling(receive, exchange):`` cancels the block then, quietly.

    The exchange ends with the block. ``on_disconnect`` is called first; when it returns True, the block has two seconds
    to end. Most requests end before a client could lose patience. So one timer looks at all of them, and only a request
    that it meets gets a task that waits for its client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_disconnect: Callable[[Exchange], bool]) -> None:
        self.loop = loop
        self.on_disconnect = on_disconnect
        self._young: set[_Watched] = set()
        self._old: set[_Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """The exchanges of the clients that wait now, and those that plugins derived from them."""
        for watched in chain(self._young, self._old):
            yield from watched.exchange.all_parts()

    def cancelling(self, receive: Receive, exchange: Exchange) -> _Watched:
        """The context manager. The request's body must have been read from ``receive``."""
        return _Watched(self, receive, exchange)

    def add(self, watched: _Watched) -> None:
        self._young.add(watched)
        if self._timer is None:
            self._timer = self.loop.call_later(_PATIENCE_S, self._look)

    def discard(self, watched: _Watched) -> None:
        self._young.discard(watched)
        self._old.discard(watched)

    def _look(self) -> None:
        self._timer = None
        for watched in self._young:
            watched.begin()
        self._old |= self._young
        self._young.clear()


class _Watched:
    """One request under a Watch."""

    __slots__ = ("_cancelled", "_grace", "_over", "_receive", "_task", "_waiting", "_watch", "exchange")

    def __init__(self, watch: Watch, receive: Receive, exchange: Exchange) -> None:
        self._watch = watch
        self._receive = receive
        self.exchange = exchange
        self._cancelled = self._over = False
        self._waiting: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None

    def __enter__(self) -> _Watched:
        # Without the loop asyncio would look for it, which costs a system call.
        task = asyncio.current_task(self._watch.loop)
        assert task is not None  # narrowing: this is async code
        self._task = task
        self._watch.add(self)
        return self

    def end(self) -> None:
        """Watch no longer. To be called before the last piece is sent: behind it servers say "disconnect" as well."""
        self._over = True

    def begin(self) -> None:
        # A task group would cost a third of the throughput. This task ends within a step of __exit__.
        self._waiting = self._watch.loop.create_task(self._wait())

    async def _wait(self) -> None:
        message = await self._receive()
        # Middleware that replays the body answers at once, for ever: it cannot tell when the client leaves.
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
        self._watch.discard(self)
        if self._grace is not None:
            self._grace.cancel()
        if self._waiting is not None and kind is not None:
            # After a whole reply the server ends receive() by itself. A cancelled task leaves cycles behind,
            # which under load kept the garbage collector busy for a twentieth of the time.
            self._waiting.cancel()
        self._waiting = None  # its error leads back here: a body would wait for the garbage collector
        if self._cancelled:
            # The cancellation may have been asked for without having arrived; either way it ends here,
            # unless somebody else wants the task to end as well.
            return self._task.uncancel() == 0 and kind is asyncio.CancelledError
        return False
