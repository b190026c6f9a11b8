"""ASGI middleware that writes a line for each request, and the layer that notes its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeAlias

from router_core import Exchange, Worker
from router_core.errors import HTTPError, NoWorker
from router_core.reply import Reply
from router_core.request import Request
from router_core.sender import Sender
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_access_log.record import Record
from slime_http.asgi import send_now_of
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(scope)

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not record.complete:
                record.client_gone = True
            return message

        token = self._current.set(record)
        try:
            await self._app(scope, received, _Answer(send, record).send)
        finally:
            self._current.reset(token)
            self._log(record)

    @staticmethod
    def _log(record: Record) -> None:
        """Log as ``logger.info`` does, which would look for its caller in all frames of the stack."""
        if logger.isEnabledFor(logging.INFO):
            extra = {"fields": record.fields(), "may_wait": True}
            logger.handle(
                logger.makeRecord(logger.name, logging.INFO, __file__, 0, "request", (), None, extra=extra)
            )


class _Answer:
    """Wraps ``send`` of one request, and the server's ``send_now``, if it has one."""

    def __init__(self, send: Send, record: Record) -> None:
        self._send = send
        self._record = record
        self._counts = (self._count,)
        inner = send_now_of(send)
        self._inner_now = inner
        self.send_now = None if inner is None else self._now

    async def send(self, message: Message) -> None:
        """Pass ``message`` on."""
        record = self._record
        if message["type"] == "http.response.start":
            record.status = message["status"]
            record.untouched = _NOT_EXACT in [*map(tuple, message.get("headers", ()))]
        else:
            body = message.get("body", b"")
            if record.status >= 400 and len(record.error) < MAX_ERROR_BYTES:
                record.error += bytes(body[:MAX_ERROR_BYTES])
            self._count(body)
            record.complete = not message.get("more_body", False)
        began = perf_counter()
        await self._send(message)
        record.client_s += perf_counter() - began

    def _now(self, piece: Any, before: Iterable[Callable[[bytes], object]]) -> bool:
        assert self._inner_now is not None  # narrowing: else there is no send_now
        return self._inner_now(piece, (*before, *self._counts))

    def _count(self, piece: bytes) -> None:
        record = self._record
        if piece:
            record.first_byte_at = record.first_byte_at or perf_counter()
            record.sent_bytes += len(piece)


class NotingSender:
    """A Sender that notes each attempt and its worker, and why none of ``workers`` is chosen. ``inner`` chooses."""

    def __init__(self, inner: Sender, current: Current, workers: Iterable[Worker]) -> None:
        self._inner = inner
        self._workers = workers
        self._current = current

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Choose as the inner one does."""
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
