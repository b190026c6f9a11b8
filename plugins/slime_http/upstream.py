"""Requests to one worker over pooled connections.

One timer per worker checks the deadlines of all answers and the age of idle connections. The timer runs only while
there are connections.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from slime_http.asgi import Headers
from slime_http.connection import Connection
from slime_http.errors import BadRequest, HTTPError, WorkerBroke, WorkerUnreachable
from slime_http.hop_by_hop import NOT_SENT, PLAIN_CONNECTION
from slime_http.limits import Limits
from slime_http.message_faults import UnsendableRequest, request_fault
from slime_http.pool import Pool
from slime_http.upstream_reply import UpstreamReply

__all__ = ["Upstream"]

#: If a reused connection fails within this many seconds, the worker has probably closed it before the request came.
_RACE_S = 0.5
#: CONNECT would make a tunnel of a pooled connection. TRACE would show the client the headers that the router adds.
_NOT_PASSED = ("CONNECT", "TRACE")


def _anywhere(url: str, address: str) -> bool:
    return True


def _close_if_unsendable(reply: UpstreamReply, method: str, target: bytes, headers: Headers) -> None:
    """Close ``reply`` and raise UnsendableRequest if the request has a fault."""
    if (fault := request_fault(method, target, headers)) is not None:
        reply.close()
        raise UnsendableRequest(fault)


class Upstream(Pool):
    """Requests to one worker.

    ``reachable(url, address)`` returns True if requests to ``url`` may go to the IP ``address``.
    """

    def __init__(
        self,
        url: str,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        *,
        api_key: str | None = None,
        reachable: Callable[[str, str], bool] = _anywhere,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self.limits = limits
        self.heard_at = -math.inf  # loop time
        self.loop = asyncio.get_running_loop()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._host_line = b"host: %s\r\n" % parts.netloc.encode("ascii")
        self.authorize(api_key)
        self._reachable = reachable
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._retired = False
        self._sweeper: asyncio.TimerHandle | None = None

    def authorize(self, api_key: str | None) -> None:
        """Send ``api_key`` to the worker from now on, with each request that has no Authorization header."""
        line = b"" if api_key is None else b"authorization: Bearer %s\r\n" % api_key.encode("ascii")
        self._key_line = line

    @property
    def open_connections(self) -> int:
        """The number of connections: busy, idle, or being opened."""
        return len(self._connections)

    @property
    def busy_connections(self) -> int:
        """The number of connections that have an exchange under way, or are being opened."""
        return len(self._connections) - sum(connection.open for connection in self._idle)

    async def request(self, method: str, target: bytes, headers: Headers, body: bytes = b"") -> UpstreamReply:
        """Send a request, and return its reply once status and headers have come.

        A reused connection that dies at once, before the first byte of a reply, has lost the race with the worker's
        keep-alive timer. In that case the request is sent once more, on a fresh connection. After a later failure the
        request is not repeated, since the worker may have acted on it. Raises WorkerUnreachable (nothing was sent),
        WorkerBroke, WorkerTimeout, and BadRequest for a method or a Transfer-Encoding that is not passed on. On
        cancellation the connection is closed.

        Raises UnsendableRequest if the request cannot be written, or if it has a fault and the worker answers 400: that
        answer would blame the client for what a plugin did.
        """
        if not isinstance(body, bytes | bytearray | memoryview):
            raise UnsendableRequest(f"the body is a {type(body).__name__}; wanted bytes")
        try:
            head = self._head(method, target, headers, len(body))
        except HTTPError:
            raise
        except Exception as error:
            raise UnsendableRequest(request_fault(method, target, headers) or str(error)) from error
        lost: WorkerBroke | None = None
        connection = self._take_idle()
        if connection is not None:
            sent_at = self.loop.time()
            reply = connection.begin(method, head, body)
            try:
                while not reply.status:
                    await reply.news()
            except WorkerBroke as error:
                if error.answered or self._retired or self.loop.time() - sent_at > _RACE_S:
                    raise
                lost = error
            except BaseException:
                reply.close()
                raise
            else:
                if reply.status == 400:
                    _close_if_unsendable(reply, method, target, headers)
                return reply
        try:
            connection = await self._connect()
        except WorkerUnreachable:
            if lost is not None:
                raise lost from None
            raise
        reply = connection.begin(method, head, body)
        try:
            while not reply.status:
                await reply.news()
        except BaseException:
            reply.close()
            raise
        if reply.status == 400:
            _close_if_unsendable(reply, method, target, headers)
        return reply

    def _head(self, method: str, target: bytes, headers: Headers, length: int) -> bytes:
        if method in _NOT_PASSED:
            raise BadRequest(f"{method} is not passed on to workers")
        lines = [method.encode("ascii"), b" ", target, b" HTTP/1.1\r\n", self._host_line]
        line_ends = 3  # of the request line, of Host, and of the empty line
        named: list[bytes] = []
        for name, value in headers:
            if name not in NOT_SENT:
                lines += (name, b": ", value, b"\r\n")
                line_ends += 1
            elif name == b"connection" and value.lower() not in PLAIN_CONNECTION:
                named += [token.strip().lower() for token in value.split(b",")]
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                raise BadRequest(f"Transfer-Encoding: wanted chunked, got {value[:80].decode('latin-1')}")
        if named:
            rest = [pair for pair in headers if pair[0] not in named and pair[0] != b"connection"]
            return self._head(method, target, rest, length)
        if self._key_line and not any(name == b"authorization" for name, _ in headers):
            lines.append(self._key_line)
            line_ends += 1
        if length or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
            lines.append(b"content-length: %d\r\n" % length)
            line_ends += 1
        lines.append(b"\r\n")
        head = b"".join(lines)
        # The parser has checked a client's headers, but headers of a plugin may be unchecked.
        if head.count(b"\n") != line_ends or head.count(b"\r") != line_ends:
            raise UnsendableRequest(request_fault(method, target, headers) or "it has a line break")
        return head

    async def _connect(self) -> Connection:
        connection = Connection(self)
        self._connections.add(connection)
        try:
            async with asyncio.timeout(self.limits.connect_s):
                await self.loop.create_connection(
                    lambda: connection,  # type: ignore[type-var]  # it has the methods of asyncio.Protocol
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls is not None else None,
                )
        except TimeoutError:
            self._connections.discard(connection)
            told = f"worker {self.url} did not accept a connection within {self.limits.connect_s:g} s"
            raise WorkerUnreachable(told, status=504) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no resolver takes
            self._connections.discard(connection)
            raise WorkerUnreachable(f"worker {self.url} cannot be reached: {_reason(error)}") from None
        except BaseException:
            connection.abort()
            self._connections.discard(connection)
            raise
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self.limits.tick_s, self._sweep)
        peer = connection.peer
        if peer is None or not connection.open:
            connection.abort()
            raise WorkerUnreachable(f"worker {self.url} closed the connection at once")
        if not self._reachable(self.url, peer):
            connection.abort()
            cure = f"add {self._host} to --allow-worker"
            raise WorkerUnreachable(f"worker {self.url} is at {peer}, a reserved address: {cure}")
        return connection

    # The pool: last in, first out, so that surplus connections stay idle until they are closed.

    def _take_idle(self) -> Connection | None:
        now = self.loop.time()
        while self._idle:
            connection = self._idle.pop()
            if connection.deadline > now and connection.quiet:
                return connection
            connection.abort()
        return None

    def put_back(self, connection: Connection) -> None:
        """Keep ``connection``, which is free again, for another request."""
        if self._retired:
            connection.abort()
            return
        self.heard_at = self.loop.time()
        connection.deadline = self.heard_at + self.limits.idle_s
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Remove ``connection``, which is closed."""
        self._connections.discard(connection)

    def retire(self) -> None:
        """Close the idle connections; a busy connection closes at the end of its request."""
        self._retired = True
        while self._idle:
            self._idle.pop().abort()

    def _sweep(self) -> None:
        now = self.loop.time()
        idle = set(self._idle)
        for connection in [*self._connections]:
            if connection.deadline <= now and not connection.held:
                if connection in idle:
                    connection.abort()
                else:
                    connection.expire()
        self._idle = [connection for connection in self._idle if connection.open]
        self._sweeper = self.loop.call_later(self.limits.tick_s, self._sweep) if self._connections else None

    def close(self) -> None:
        """Close all connections. Requests in flight fail."""
        self.retire()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in [*self._connections]:
            connection.break_off("was cut off: the router is closing")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
