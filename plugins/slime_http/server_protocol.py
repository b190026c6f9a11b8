"""HTTP/1.1 connections of clients: one application task per request, and answers in the order of the requests.

The event loop accepts connections and does TLS, and uvicorn runs the lifespan. A request costs no timer, event or
future here if it comes in one piece and the client reads the answer at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context

import httptools
import uvicorn
from uvicorn.server import ServerState

from slime_http.asgi import ASGIApp
from slime_http.client_connection import ClientConnection, Observer
from slime_http.request_head import connection_scope, request_scope
from slime_http.response_head import error_answer
from slime_http.server_request import ServerRequest
from slime_http.write_flow import WriteFlow

__all__ = ["Protocol"]

_MAX_HEAD_BYTES = 256 * 1024
#: Pipelined requests that may wait on one connection before reading pauses. One read may bring more requests.
_MAX_AHEAD = 16


class Protocol(ClientConnection):
    """HTTP/1.1 on one connection, with limits for clients that send too much, or send or read too slowly.

    ``keep_alive_s`` is the time until a request begins. ``client_timeout_s`` is the time for a request's head, and for
    each further piece of its body. It is also the time for a slow client to take 64 KiB of an answer. Errors are JSON.
    The server makes one instance for each connection, and passes uvicorn's ``config`` and ``server_state``.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        client_timeout_s: float,
        keep_alive_s: float,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._app: ASGIApp = config.loaded_app
        self._state = app_state
        self._connections, self._tasks = server_state.connections, server_state.tasks
        self._loop = _loop or asyncio.get_running_loop()
        self.time = self._loop.time
        self._client_timeout_s = client_timeout_s
        self._keep_alive_s = keep_alive_s
        self.observers = observers
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        # A request that follows a request with "Connection: close" is no error; it is not answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        #: ``served``: the request being answered, or answered last. ``_newest``: the request being read, or read last.
        #: ``_waiting``: the requests after ``served``, in order.
        self.served: ServerRequest | None = None
        self._newest: ServerRequest | None = None
        self._waiting: deque[ServerRequest] = deque()
        self._in_message = self._in_head = self._expects_continue = self._is_reading_paused = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._url = b""
        #: Bytes since the last body bytes: of a head, of trailers, of chunk extensions.
        self._overhead = 0
        self._fault = "the request is not valid HTTP/1.1"
        #: Event loop time by which a request must begin or, with ``_is_rest_due``, go on. None: no deadline.
        self._due: float | None = None
        self._is_rest_due = False
        self._timer: asyncio.TimerHandle | None = None

    # Called by the event loop and by uvicorn.

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._connections.add(self)  # type: ignore[arg-type]  # our server only uses shutdown() and served
        self._scope = connection_scope(transport)
        self._context = copy_context()
        self.flow = WriteFlow(transport, self._loop, self._client_timeout_s, self._scope["client"])
        self._expect(self.time() + self._keep_alive_s, rest=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
        self.flow.end()
        self._disconnect()
        # These attributes refer to this object: a reference cycle would wait for the garbage collector.
        self.served = self._newest = self._parser = None

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        assert self._parser is not None  # narrowing: the connection is not lost
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._newest is not None:
                self._newest.keep_alive = False  # the bytes after this request may be another protocol's
        except httptools.HttpParserError:
            self._refuse(400, self._fault)
            return
        if self.transport.is_closing():
            return
        # A head that comes whole in one read may be larger: httptools has it in memory by then.
        if self._overhead > _MAX_HEAD_BYTES:
            self._refuse(431, f"the request's headers are larger than {_MAX_HEAD_BYTES} bytes")
            return
        has_begun = self._in_message or (self._overhead and self._is_idle)  # empty lines are a beginning, too
        if has_begun and not (self._is_rest_due and self._in_head):  # the time for a head is not extended
            self._expect(self.time() + self._client_timeout_s, rest=True)

    def eof_received(self) -> None:
        self._close()  # the event loop would also close, but only once the client has taken the last bytes

    def pause_writing(self) -> None:
        self.flow.pause()

    def resume_writing(self) -> None:
        self.flow.resume()

    def shutdown(self) -> None:
        """Close the connection when the requests that have come are answered."""
        if self._newest is None or self._newest.complete:
            self._close()
        else:
            self._newest.keep_alive = False

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        if not self._is_rest_due:
            self._due = None
        self._url = b""
        self._headers = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer field is no header (RFC 9110 section 6.5.1), and there may be many
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None  # narrowing: the parser calls this method
        try:
            scope = request_scope(self._scope, parser, self._url, self._headers)
        except ValueError as error:
            self._fault = str(error)
            raise
        self._in_head = False  # only now: an error raised above is an error in the head, and gets an answer
        scope["state"] = self._state.copy()
        is_1_1 = scope["http_version"] == "1.1"
        request = ServerRequest(
            self,
            self._app,
            scope,
            keep_alive=is_1_1 and parser.should_keep_alive(),
            expects_continue=is_1_1 and self._expects_continue,
        )
        before, self._newest = self._newest, request
        if before is None or before.complete:
            self._serve(request)
        else:
            self._waiting.append(request)
            if len(self._waiting) >= _MAX_AHEAD:
                self._pause_reading()

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        request = self._newest
        assert request is not None  # narrowing: it has a head
        if not request.complete and request.feed(body):
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._in_message = self._is_rest_due = False
        self._overhead = 0
        self._due = None
        request = self._newest
        assert request is not None  # narrowing: it has a head
        if request.complete:
            self._expect(self.time() + self._keep_alive_s, rest=False)
        else:
            request.feed_end()

    # Called by requests.

    def read_on(self) -> None:
        """See ClientConnection."""
        if self._is_reading_paused and len(self._waiting) < _MAX_AHEAD:
            self._is_reading_paused = False
            # asyncio calls data_received in this context from now on: no request's variables leak into another.
            self._context.copy().run(self.transport.resume_reading)

    def continued(self) -> None:
        """See ClientConnection."""
        self._expect(self.time() + self._client_timeout_s, rest=True)

    def answered(self, request: ServerRequest) -> None:
        """See ClientConnection."""
        request.ended = now = self.time()
        if not request.keep_alive:
            self._close()
            return
        if self._waiting:
            self._context.copy().run(self._serve, self._waiting.popleft())
        if self._is_rest_due:
            self._expect(now + self._client_timeout_s, rest=True)  # for a request that began meanwhile
        elif request is self._newest:
            self._expect(now + self._keep_alive_s, rest=False)
        if self._is_reading_paused:
            self.read_on()

    def ended(self, request: ServerRequest) -> None:
        """See ClientConnection."""
        if request.task is not None:
            self._tasks.discard(request.task)
            request.task = None  # a cancelled task keeps its error, which refers to the request

    @property
    def _is_idle(self) -> bool:
        """True when all requests that have come are answered."""
        return self._newest is None or self._newest.complete

    def _serve(self, request: ServerRequest) -> None:
        self.served = request
        request.task = self._loop.create_task(request.run())
        self._tasks.add(request.task)

    def _pause_reading(self) -> None:
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()

    # Timeouts of clients.

    def _expect(self, due: float, *, rest: bool) -> None:
        """Set the deadline ``due``, an event loop time, for the ``rest`` of a request or for the next request.

        A timer that is set for an earlier time stays; when it fires, it is set for the deadline.
        """
        self._due, self._is_rest_due = due, rest
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None or self.transport.is_closing():
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        served = self.served
        waits_itself = self._is_reading_paused
        if served is not None and not served.complete:
            waits_itself |= self._in_head or served is not self._newest or served.expects_continue
        if waits_itself:
            self._expect(self.time() + self._client_timeout_s, rest=self._is_rest_due)
        elif self._in_message:
            self._refuse(408, f"the request did not go on for {self._client_timeout_s:g} s")
        else:
            self._close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, and close. No error is sent if it could be taken for a part of another answer."""
        self.flow.log_refusal(status, message)
        served = self.served
        in_body = self._in_message and not self._in_head
        if served is None or not served.written or (served.complete and not in_body):
            self.transport.write(error_answer(status, message))
        self._disconnect()
        self._close()

    def _disconnect(self) -> None:
        """Drop the waiting requests, and disconnect the request that is being answered."""
        self._waiting.clear()
        if self.served is not None:
            self.served.disconnect()

    def _close(self) -> None:
        """Close the connection once the client has taken the buffered bytes, or its time for that is over."""
        if not self.transport.is_closing():
            self.flow.expect_taken()
            self.transport.close()
