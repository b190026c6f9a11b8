"""ASGI middleware that writes a line for each request, and the sender that notes the request's workers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextvars import ContextVar
from time import perf_counter, time
from typing import Any, TypeAlias

from router_core import Exchange, Worker
from router_core.errors import HTTPError, NoWorker
from router_core.reply import Reply
from router_core.request import Request
from router_core.sender import Sender
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_access_log.record import Record
from slime_http.asgi import SendNow, send_now_of
from slime_http.error_codes import MAX_ERROR_BYTES

__all__ = ["Current", "Logged", "NotingSender", "logger"]

logger = logging.getLogger(__package__)
logger.setLevel(logging.INFO)  # at any --log-level: these lines have a flag of their own

#: The record of the request that a task answers.
Current: TypeAlias = ContextVar[Record | None]

_NOT_EXACT = (b"x-slime-exact", b"false")


class Logged:
    """Writes a line at the end of each request, also of those that are refused or that the router answers itself."""

    def __init__(self, app: ASGIApp, current: Current) -> None:
        self._app = app
        self._current = current
        self._template = logger.makeRecord(logger.name, logging.INFO, __file__, 0, "request", (), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(scope)
        client = _Client(receive, send, record)
        token = self._current.set(record)
        try:
            await self._app(scope, client.receive, client.send)
        finally:
            self._current.reset(token)
            self._log(record)

    def _log(self, record: Record) -> None:
        """Log as ``logger.info`` does, but without its search for the caller, the thread and the process."""
        if logger.isEnabledFor(logging.INFO):
            line, template, created = logging.LogRecord.__new__(logging.LogRecord), self._template, time()
            line.__dict__ = {
                **template.__dict__,
                "created": created,
                "msecs": created % 1 * 1000,
                "relativeCreated": template.relativeCreated + (created - template.created) * 1000,
                "fields": record.fields(),
                "may_wait": True,
            }
            logger.handle(line)


class _Client:
    """Wraps ``receive`` and ``send`` of one request, and the server's ``send_now``, if it has one."""

    __slots__ = ("_inner_now", "_receive", "_record", "_send")

    def __init__(self, receive: Receive, send: Send, record: Record) -> None:
        self._receive = receive
        self._send = send
        self._record = record
        self._inner_now = send_now_of(send)

    async def receive(self) -> Message:
        """Return the next message of the client."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._record.complete:
            self._record.client_gone = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Pass ``message`` on."""
        if message["type"] != "http.response.start":
            return self._send_body(message)
        record = self._record
        record.status = message["status"]
        headers = message.get("headers", ())
        record.untouched = _NOT_EXACT in headers or [*_NOT_EXACT] in headers
        return self._send(message)

    async def _send_body(self, message: Message) -> None:
        record, body = self._record, message.get("body", b"")
        if record.status >= 400 and len(record.error) < MAX_ERROR_BYTES:
            record.error += bytes(body[:MAX_ERROR_BYTES])
        began = perf_counter()
        if body:
            record.first_byte_at = record.first_byte_at or began
            record.sent_bytes += len(body)
        record.complete = not message.get("more_body", False)
        await self._send(message)
        record.client_s += perf_counter() - began

    @property
    def send_now(self) -> SendNow | None:
        """A wrapper of the server's ``send_now``, if any, which takes pieces of a stream without waking a task."""
        # Made each time: an object that refers to its own method would wait for the garbage collector.
        return None if self._inner_now is None else self._now

    def _now(self, piece: Any, before: Iterable[Callable[[bytes], object]]) -> bool:
        assert self._inner_now is not None  # narrowing: else there is no send_now
        return self._inner_now(piece, (*before, self._count))

    def _count(self, piece: bytes) -> None:
        record = self._record
        record.first_byte_at = record.first_byte_at or perf_counter()
        record.sent_bytes += len(piece)


class NotingSender:
    """A Sender that notes each attempt and its worker, or why ``inner`` can choose none of ``workers``."""

    def __init__(self, inner: Sender, current: Current, workers: Iterable[Worker]) -> None:
        self._inner = inner
        self._workers = workers
        self._current = current

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Let ``inner`` choose."""
        try:
            self._inner.choose(exchange, but)
        except NoWorker:
            if (record := self._current.get()) is not None:
                record.no_worker(self._workers)
            raise

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Send ``request``."""
        record, worker = self._current.get(), exchange.worker
        if record is None or worker is None:
            return await self._inner.send(exchange, request, body)
        record.sent(worker)
        try:
            return await self._inner.send(exchange, request, body)
        except HTTPError as error:
            record.attempt_failed(worker, error.code)
            raise
