"""One HTTP/1.1 connection to a worker: an asyncio protocol, whose answers httptools (llhttp) parses.

This is the byte path, so it has no task, no lock and no cancel scope per request. Framing follows RFC 9112 strictly. An
answer with ambiguous framing (two lengths, a length and chunks, another transfer coding) breaks the connection and is
not passed on. Bytes after a complete answer close the connection, but the answer stays valid.
"""

from __future__ import annotations

import asyncio
import math
import select
import ssl

import httptools

from slime_http.asgi import Headers
from slime_http.errors import WorkerBroke, WorkerTimeout
from slime_http.hop_by_hop import NOT_RETURNED, PLAIN_CONNECTION
from slime_http.pool import Pool
from slime_http.upstream_reply import Source, UpstreamReply

__all__ = ["Connection"]

#: Request bodies go to the transport in slices of this many bytes. A slice waits while the transport's buffer is full.
_SLICE = 256 * 1024


class Connection(Source):
    """One connection, busy with at most one exchange."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: UpstreamReply | None = None
        self._held = False
        self._upload: memoryview | None = None
        self._upload_paused = False
        self.deadline = math.inf  # no deadline before the first request
        self._reset("")

    def _reset(self, method: str) -> None:
        self._method = method
        self._answered = False
        self._headers: Headers = []
        self._head_bytes = 0
        self._unparsed = 0
        self._head_done = self._message_done = False
        self._framed = self._sized = self._streams = False
        self._ended = self._keep_alive = False
        self._named: list[bytes] = []
        #: Pieces of an event stream that came in one read.
        self._events: list[bytes] = []

    # One exchange.

    def begin(self, method: str, head: bytes, body: bytes) -> UpstreamReply:
        """Send a request, and return its reply. The head of the reply has come when ``status`` is not 0."""
        transport = self._transport
        assert transport is not None  # narrowing: connected before it is used
        self._reset(method)
        pool = self._pool
        self._reply = reply = UpstreamReply(self, pool.loop)
        self.deadline = reply.sent_at + pool.limits.first_byte_s
        if len(body) <= _SLICE:
            transport.write(head + body if body else head)
        else:
            transport.write(head)
            self._upload = memoryview(body)
            self._pump()
        return reply

    def _pump(self) -> None:
        if self._upload is not None and not self._upload_paused and self._transport is not None:
            self._transport.write(self._upload[:_SLICE])
            self._upload = self._upload[_SLICE:] or None
            self._pool.loop.call_soon(self._pump)  # let other tasks run between two slices

    def pause_writing(self) -> None:
        self._upload_paused = True

    def resume_writing(self) -> None:
        self._upload_paused = False
        self._pump()

    def resume_reply(self) -> None:
        """Resume reading: the client has taken everything that was buffered."""
        if self._held and self._transport is not None:
            self._held = False
            self.deadline = self._pool.loop.time() + self._pool.limits.silence_s
            self._transport.resume_reading()

    @property
    def held(self) -> bool:
        """True while reading is paused for a slow client. Meanwhile no deadline of the worker counts."""
        return self._held

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def peer(self) -> str | None:
        """The worker's IP address; None when the connection is closed already."""
        if self._transport is None:
            return None
        try:
            name = self._transport.get_extra_info("peername")
        except OSError:  # uvloop asks the socket, which may be closed
            return None
        return str(name[0]) if name else None

    @property
    def quiet(self) -> bool:
        """True when the connection is open and the kernel holds nothing unread from the worker.

        Unread bytes would be taken for the next request's answer. A close by the worker would cost the next
        request a second attempt. The check takes half a microsecond.
        """
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._arrivals(0)

    def abort(self) -> None:
        """Close at once."""
        self._reply = None
        self._upload = None
        self._pool.forget(self)  # now: connection_lost comes only at the loop's next turn
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """Fail the exchange: its deadline has passed."""
        limits = self._pool.limits
        what, limit = ("go on", limits.silence_s) if self._head_done else ("answer", limits.first_byte_s)
        self._fail(WorkerTimeout(f"worker {self._pool.url} did not {what} within {limit:g} s"))

    def _fail(self, error: WorkerBroke | WorkerTimeout) -> None:
        reply = self._reply
        self.abort()
        if reply is not None:
            reply.fail(error)

    def break_off(self, what: str) -> None:
        """Close at once. The exchange fails with the message "worker URL", followed by ``what``."""
        self._fail(WorkerBroke(f"worker {self._pool.url} {what}", answered=self._answered))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        poller = select.poll()
        poller.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._arrivals = poller.poll

    def eof_received(self) -> None:
        assert self._transport is not None  # narrowing: connected
        tls: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        try:
            # Without TLS's closing alert somebody on the wire may have cut the body short (RFC 9112 section 9.8).
            self._ended = tls is None or tls.read(1) == b""
        except ssl.SSLError:
            self._ended = False
        # Without abort() the transport would wait, perhaps for ever, until the worker has read the whole request.
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._upload = None
        self._pool.forget(self)
        reply, self._reply = self._reply, None
        if reply is not None:
            if self._head_done and not self._framed and self._ended:
                reply.end()  # RFC 9112 section 6.3, rule 8: the body ends with the connection
            else:
                when = "in the middle of its answer" if self._answered else "before answering"
                what = f"worker {self._pool.url} closed the connection {when}"
                reply.fail(WorkerBroke(what, answered=self._answered))

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.abort()  # bytes that nobody asked for; they must not become the next request's answer
            return
        self._answered = True
        self._unparsed += len(data)
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = error
        if self._events:
            events, self._events = self._events, []
            self._put(b"".join(events))  # one write to the client, and one wake-up of a reader
        if fault is not None:
            if not self._message_done:
                cause = fault.__context__
                self.break_off(str(cause) if isinstance(cause, _Refused) else f"broke HTTP: {fault}")
                return
            self._keep_alive = False  # the answer is complete; the error is in the bytes after it
        if self._message_done:
            self._finish()
        elif self._unparsed > self._pool.limits.head_bytes:
            self.break_off(f"sent more than {self._pool.limits.head_bytes} bytes without a header or a body")
        elif self._head_done:  # until the head is complete, no byte extends the first-byte deadline
            now = self._pool.heard_at = self._pool.loop.time()
            self.deadline = now + self._pool.limits.silence_s

    def _finish(self) -> None:
        reply, self._reply = self._reply, None
        assert reply is not None  # narrowing: a message ends while it is awaited
        assert self._transport is not None  # narrowing: the message came over it
        sent = self._upload is None and not self._transport.get_write_buffer_size()
        if self._keep_alive and sent and not self._transport.is_closing():
            if self._held:
                self._held = False
                self._transport.resume_reading()
            self._pool.put_back(self)
        else:
            self._pool.heard_at = self._pool.loop.time()
            self.abort()
        reply.end()

    # Callbacks of httptools. feed_data turns their exceptions into the context of an HttpParserCallbackError.

    def on_message_begin(self) -> None:
        if self._message_done:
            self._keep_alive = False
            raise _Refused("sent bytes after its answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed = 0
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._pool.limits.head_bytes:
            raise _Refused(f"sent headers of more than {self._pool.limits.head_bytes} bytes")
        if self._head_done:
            return  # a trailer field: it is dropped, since the router sends no TE that asks for trailers
        name = name.lower()
        if name == b"content-length":
            self._framed = self._sized = True
        elif name in NOT_RETURNED:
            if name == b"transfer-encoding":
                # The router sends no TE, so the worker may use no other transfer coding, such as gzip.
                if self._framed or value.strip().lower() != b"chunked":
                    raise _Refused(f"framed its answer in an unknown way ({value[:80]!r})")
                self._framed = True
            elif name == b"connection" and value.lower() not in PLAIN_CONNECTION:
                self._named += [token.strip().lower() for token in value.split(b",")]
            return
        elif name == b"content-type":
            self._streams = value.startswith(b"text/event-stream")
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            if status == 101:
                raise _Refused("switched protocols unasked")
            return  # its bytes count towards a limit, so a worker cannot send 1xx for ever
        if not 200 <= status < 600:
            raise _Refused(f"answered with status {status}")
        self._unparsed = 0
        self._head_done = True
        headers = self._headers
        if self._named:
            headers = [pair for pair in headers if pair[0] not in self._named]
        assert self._reply is not None  # narrowing: data is parsed only while a reply is awaited
        self._reply.start(status, headers, sized=self._sized and not self._streams)
        if self._method == "HEAD":
            # The parser cannot be told that an answer to HEAD has no body, so this connection is not used again.
            self._message_done = True
            raise _Refused("sent an answer to HEAD")

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        if self._streams:
            self._events.append(body)
        else:
            self._put(body)

    def _put(self, body: bytes) -> None:
        reply, transport = self._reply, self._transport
        if reply is not None and reply.put(body) and not self._held and transport is not None:
            self._held = True
            transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head_done:
            self._message_done = True
            self._keep_alive = self._parser.should_keep_alive()
        else:  # a 1xx response, which is for this hop only
            self._headers = []
            self._named = []
            self._framed = self._sized = self._streams = False


class _Refused(Exception):
    """A protocol violation of the worker. The message completes a sentence that begins with "worker URL"."""
