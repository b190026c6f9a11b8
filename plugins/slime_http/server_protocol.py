"""uvicorn's HTTP protocol, as this project uses it: limits for what a client may send, and for how long it may take.

Nothing here costs a request that comes in one piece and is read at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sized
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["Protocol"]

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 256 * 1024
#: Requests that wait on one connection before it is read no further; what one read brings comes on top.
_MAX_AHEAD = 16
_FRAMING = (b"content-length", b"transfer-encoding")


class _Nowhere(list[tuple[bytes, bytes]]):
    """A sink for the trailer fields of a request: they are no headers (RFC 9110 section 6.5.1), and may be many."""

    def append(self, _: tuple[bytes, bytes]) -> None:
        pass


_NOWHERE = _Nowhere()


class _Flow(FlowControl):
    """Reads no further while many requests wait on one connection: clients may send ahead, but not without end."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if len(self._waiting) < _MAX_AHEAD:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits for clients that send or take too much or too slowly, and errors as JSON.

    ``client_timeout_s`` is the time for the head of a request, and for each further piece of its body. It is also the
    time for a client to take 64 KiB of what waits for it. A request that comes in one read, and an answer that is
    taken as it comes, need no timer.
    """

    #: The request that is being answered; uvicorn's ``cycle`` is the newest one.
    _served: RequestResponseCycle | None = None
    _in_message = _in_head = False
    #: Bytes in a row that are no body: those of a head, of trailers, of what may stand beside the size of a chunk.
    _overhead = 0
    _unsent = 0
    _fault = "the request is not valid HTTP/1.1"
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, client_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client_timeout_s = client_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        # uvicorn begins with this after an answer, and who never asks holds a connection as well.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True  # uvicorn tells the newest one
            served.message_event.set()

    # Methods called for each request name their base: super() would be more than half of what these limits cost.

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        HttpToolsProtocol.data_received(self, data)
        if self.transport.is_closing():
            return
        # Within one read a head may be longer: httptools has it in memory by then.
        if self._overhead > _MAX_HEAD_BYTES:
            self._refuse(431, f"the request's headers are larger than {_MAX_HEAD_BYTES} bytes")
        elif (self._in_message or self.cycle is None or self.cycle.response_complete) and (
            self._reading is None or not self._in_head  # a head gets its time once
        ):
            self._await_more()

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        HttpToolsProtocol.on_message_begin(self)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade() and any(
            name in _FRAMING and value != b"0" for name, value in self.headers
        ):
            # httptools takes what follows for the other protocol: the body would be lost, or be the next request.
            self._fault = (
                "a request with a body may not ask for another protocol: leave out its Upgrade header"
            )
            raise ValueError(self._fault)
        HttpToolsProtocol.on_headers_complete(self)
        self.headers = _NOWHERE
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn would read no further, and not see the client hang up
        else:
            self._served = self.cycle

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        HttpToolsProtocol.on_body(self, body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._overhead = 0
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        HttpToolsProtocol.on_message_complete(self)

    def _unsupported_upgrade_warning(self) -> None:
        self.cycle.keep_alive = False  # it is answered in this protocol; behind it may be anything

    def _await_more(self) -> None:
        """Give the client its time, from now on, for the rest of a request or for the next one."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(self._client_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        served = self._served
        answering = served is not None and not served.response_complete
        if self.flow.read_paused or (answering and (self._in_head or served is not self.cycle)):
            self._await_more()  # it is not the client who keeps others waiting
        elif self._in_message:
            self._refuse(408, f"the request did not go on for {self._client_timeout_s:g} s")
        else:
            self._close()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._served, _ = self.pipeline[-1]
        HttpToolsProtocol.on_response_complete(self)
        if self.transport.is_closing():
            self._expect_taken()
        elif self._reading is not None:
            self._await_more()  # for what it had begun meanwhile

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taken()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None and not self.transport.is_closing():
            self._writing.cancel()
            self._writing = None

    def _expect_taken(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        if self._writing is None:
            self._writing = self.loop.call_later(self._client_timeout_s, self._not_taken)

    def _not_taken(self) -> None:
        self._writing = None
        if self._unsent - self.transport.get_write_buffer_size() >= HIGH_WATER_LIMIT:
            self._expect_taken()  # of a large answer, slowly
            return
        logger.warning(
            "a client takes its answer too slowly or not at all (--client-timeout-secs): %s", self.client
        )
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self._fault)

    def _refuse(self, status: int, message: str) -> None:
        served = self._served
        in_body = self._in_message and not self._in_head
        if served is None or not served.response_started or (served.response_complete and not in_body):
            error = {"message": message, "type": "invalid_request_error", "code": f"HTTP_{status}"}
            body = orjson.dumps({"error": error})
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        if served is not None:
            served.disconnected = True  # it may not have begun yet, and is not to
            served.message_event.set()
        self._close()

    def _close(self) -> None:
        """Close the connection when the client has taken what waits for it, and has not too long for that."""
        if not self.transport.is_closing():
            self._expect_taken()
            self.transport.close()
