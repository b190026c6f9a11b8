"""One request of a client, as an ASGI application sees it: ``receive`` and ``send`` (ASGI 3.0).

The head of an answer is written with the first part of its body, as ASGI requires, so a whole answer is one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from slime_http.asgi import EXPLAIN, ASGIApp, Message, Scope, note_failure
from slime_http.client_connection import ClientConnection
from slime_http.error_codes import MAX_ERROR_BYTES, code_in
from slime_http.errors import HTTPError, error_body
from slime_http.observed import ObservedRequest
from slime_http.response_head import error_answer, response_lines

__all__ = ["ServerRequest"]

logger = logging.getLogger(__name__)

#: Bytes of a request's body that may wait for the application before reading pauses.
_MAX_WAITING_BYTES = 64 * 1024
#: A body of fewer bytes is copied behind its head, since one small write is cheaper than two buffers.
_LARGE_BYTES = 64 * 1024
_NO_BODY = (204, 304)
_SHUTTING_DOWN = "the server is shutting down"
_LAST_CHUNK = b"0\r\n\r\n"


class ServerRequest(ObservedRequest):
    """A request and the answer to it.

    ``keep_alive``: the connection stays open after the answer. ``begun``: the application was called. ``started``: the
    application has given the head. ``written``: a part of the answer was written. ``complete``: the answer has
    ended, perhaps too early. ``disconnected``: the client has gone. ``expects_continue``: the client may wait for
    "100 Continue" before it sends the body. ``began`` is set only if there are observers.
    """

    __slots__ = (
        "_app", "_body", "_connection", "_event", "_has_news", "_head", "_is_chunked", "_is_head", "_left",
        "_more_body", "_size", "begun", "complete", "disconnected", "expects_continue", "keep_alive", "started",
        "task", "transport", "written",
    )  # fmt: skip

    def __init__(
        self, connection: ClientConnection, app: ASGIApp, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:  # fmt: skip
        self._connection = connection
        self.transport = connection.transport
        self._app: Any = app  # Any: another author's application may return anything
        self.scope = scope
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        self.begun = self.started = self.written = self.complete = self.is_whole = self.disconnected = False
        self.expects_continue = expects_continue
        self.status = 0
        self.streamed_at = self.began = self.ended = 0.0
        self.error = b""
        #: Parts of the body that ``receive`` has not returned yet. ``_has_news``: ``receive`` can return at once.
        self._body: list[bytes] = []
        self._size = 0
        self._more_body = True
        self._has_news = False
        #: Made by the first ``receive`` that has to wait; most requests have none.
        self._event: asyncio.Event | None = None
        #: The head of the answer until it is written.
        self._head = b""
        self._is_head = scope["method"] == "HEAD"
        self._is_chunked = False
        #: Bytes that the answer's body still lacks of its Content-Length; None: closing the connection ends the body.
        self._left: int | None = 0

    @property
    def _target(self) -> str:
        """The raw path for the log, since the decoded path may have line breaks."""
        return bytes(self.scope.get("raw_path", b"")).decode("latin-1")

    # Called by the connection. None of these waits.

    def feed(self, piece: bytes) -> bool:
        """Add a ``piece`` of the body. Returns True when reading should pause."""
        self._body.append(piece)
        self._size += len(piece)
        self._has_news = True
        if self._event is not None:
            self._event.set()
        return self._size > _MAX_WAITING_BYTES

    def feed_end(self) -> None:
        """Mark the body as complete."""
        self._more_body = False
        self._has_news = True
        if self._event is not None:
            self._event.set()

    def disconnect(self) -> None:
        """Tell the application that the client has gone, and write nothing more."""
        self.disconnected = not self.complete
        if self._event is not None:
            self._event.set()

    def cut_off(self) -> None:
        """Answer 503 and cancel the task, if the application has not begun: a task that never ran cannot answer."""
        task = self.task
        if task is not None and not self.begun:
            self._give_up(503, _SHUTTING_DOWN)
            self._connection.ended(self)
            task.cancel()

    async def run(self) -> None:
        """Call the application. If the application gives no answer or an incomplete one, end the answer."""
        observers = self._connection.observers
        try:
            if self.disconnected:
                return  # the client has gone, or the request was refused while its body came
            self.begun = True
            if observers:
                self.began = self._connection.time()
            result = await self._app(self.scope, self.receive, self.send)
            if result is not None:
                raise TypeError(f"an ASGI application returned {result!r}, wanted None")
            if not (self.complete or self.disconnected):
                logger.error("%s: the application returned before the end of its answer", self._target)
                self._give_up(500, "internal error: no answer was given")
        except asyncio.CancelledError:
            self._give_up(503, _SHUTTING_DOWN)
            raise
        except (Exception, BaseExceptionGroup) as error:
            logger.exception("%s: the application failed", self._target)
            explain = self.scope.get("state", {}).get(EXPLAIN)
            body = error_body(explain(error)) if explain is not None else None
            self._give_up(500, "internal error; the log has the traceback", body)
        finally:
            if observers and self.begun:
                if not self.complete:
                    self.ended = self._connection.time()
                for observe in observers:
                    observe(self)
            self._connection.ended(self)

    def _give_up(self, status: int, message: str, body: bytes | None = None) -> None:
        """End an incomplete answer: with an error if nothing is written yet, else by cutting it off."""
        if self.complete or self.disconnected:
            return
        if not self.written:  # else the client sees that the body breaks off, by its framing or a reset
            self.started = self.written = self.is_whole = True
            self.status = status
            self.transport.write(error_answer(status, message, to_head=self._is_head, body=body))
        else:
            code = "SHUTTING_DOWN" if status == 503 else code_in(body or b"") or HTTPError.code
            note_failure(self.scope, code)  # unless the application has noted a code
            if self._left is None:
                self._connection.flow.reset()
        self.keep_alive = False
        self._finish()

    # Called by the application.

    async def receive(self) -> Message:
        """Return the next part of the body; ``http.disconnect`` if the client has gone or the answer is complete."""
        if self.expects_continue:
            self.expects_continue = False
            if not (self._has_news or self.started or self.transport.is_closing()):
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._connection.continued()
        while not (self.disconnected or self.complete):
            if self._has_news:
                return {"type": "http.request", "body": self._take(), "more_body": self._more_body}
            self._connection.read_on()
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._event.wait()
        return {"type": "http.disconnect"}

    def take_whole(self, max_bytes: int) -> bytes | None:
        """Return the whole body. Returns None, and takes nothing, before its end or above ``max_bytes``."""
        is_over = self._more_body or self.disconnected or self.complete
        return self._take() if self._has_news and not is_over and self._size <= max_bytes else None

    def _take(self) -> bytes:
        """Return the parts of the body that have come since the last call."""
        self._has_news = self.expects_continue = False
        self._size = 0
        body = self._body.pop() if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    async def send(self, message: Message) -> None:
        """Send a part of the answer. Raises RuntimeError for a message out of order.

        Raises RuntimeError also for most invalid headers, and for a body that does not fit its Content-Length.
        Waits while the client reads more slowly than the application writes. Does nothing once the client has gone.
        """
        flow = self._connection.flow
        if flow.is_full and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.started and not self.complete:
            self._send_body(message.get("body", b""), not message.get("more_body", False))
        elif kind == "http.response.start" and not self.started:
            self._send_start(message["status"], message.get("headers", ()))
            self.started = True
        else:
            raise RuntimeError(f"the ASGI message {kind!r} cannot be sent now")

    def send_whole(self, status: int, headers: Iterable[Iterable[bytes]], body: bytes) -> bool:
        """Send a whole answer. Returns False, and does nothing, when only :meth:`send` can send it."""
        if self.started or self.disconnected or self._connection.flow.is_full:
            return False
        self._send_start(status, headers)
        self.started = True
        self._send_body(body, True)
        return True

    def send_now(
        self, piece: bytes | Callable[[], bytes], before: Iterable[Callable[[bytes], object]]
    ) -> bool:
        """Pass a further piece of a stream to each function in ``before``, then send the piece.

        Returns False, and does nothing, when only :meth:`send` can take the piece. ``piece`` may be a function that
        makes the piece; if it makes an empty piece, nothing is sent.
        """
        if self.disconnected or not self._is_chunked or self._head or self._connection.flow.is_full:
            return False
        if callable(piece) and not (piece := piece()):
            return True
        for call in before:
            call(piece)
        if not self.streamed_at:
            self.streamed_at = asyncio.get_running_loop().time()
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _send_start(self, status: int, headers: Iterable[Iterable[bytes]]) -> None:
        head, length, closes = response_lines(status, headers)
        self.status = status
        # Without "100 Continue" a client may leave its body out: its next request would be taken for the body.
        if closes or (self.expects_continue and not self._has_news):
            self.keep_alive = False
        if not (self.keep_alive or closes):
            head += b"connection: close\r\n"
        if self._is_head or status in _NO_BODY:
            pass
        elif length is not None:
            self._left = length
        elif self.scope["http_version"] == "1.1":
            self._is_chunked = True
            head += b"transfer-encoding: chunked\r\n"
        else:
            self._left = None  # HTTP/1.0 has no chunks
        self._head = head + b"\r\n"

    def _send_body(self, piece: bytes | bytearray | memoryview, is_last: bool) -> None:
        body = piece if type(piece) is bytes else bytes(memoryview(piece))  # the piece may change
        if self.status >= 400 and not self.error:
            self.error = body[:MAX_ERROR_BYTES]
        if self._is_head:
            body = b""
        elif self._is_chunked:
            if body:
                self.streamed_at = self.streamed_at or asyncio.get_running_loop().time()
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if is_last:
                body += _LAST_CHUNK
        elif self._left is None:
            if body:
                self.streamed_at = self.streamed_at or asyncio.get_running_loop().time()
        else:
            self._left -= len(body)
            if self._left < 0:
                raise RuntimeError("the body is longer than its Content-Length")
            if is_last and self._left:
                raise RuntimeError(f"the body is {self._left} bytes shorter than its Content-Length")
        self._write(body)
        if is_last:
            self.is_whole = True
            self._finish()

    def _write(self, data: bytes) -> None:
        """Write ``data``, after the head if the head is not written yet."""
        head, self._head = self._head, b""
        self.written = True
        if head and len(data) >= _LARGE_BYTES:
            self.transport.writelines((head, data))
        elif head or data:
            self.transport.write(head + data)

    def _finish(self) -> None:
        self.complete = True
        self._body.clear()  # this object lives until the next request comes
        if self._event is not None:
            self._event.set()
        self._connection.answered(self)
