"""Spans: one for each request of a client, and one for each attempt at a worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, Tracer, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router_core import Exchange, Worker
from router_core.errors import HTTPError
from router_core.reply import Reply
from router_core.request import Request
from router_core.sender import Sender
from router_core.types import ASGIApp, Headers, Message, Receive, Scope, Send
from slime_http.asgi import send_now_of
from slime_otel.gen_ai import Attributes, span_name
from slime_sglang.generation import GENERATION_PATHS

__all__ = ["NOTE", "Attempt", "Current", "TracedRequest", "TracingMiddleware", "TracingSender"]

#: Key in ``exchange.notes`` of the attempt that is under way.
NOTE = "otel"
_PROPAGATOR = TraceContextTextMapPropagator()
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
#: Paths that probes and scrapers ask for; these requests get no span.
_QUIET = frozenset(("/health", "/liveness", "/readiness", "/metrics", "/engine_metrics"))


class TracedRequest:
    """A traced request. ``context``: the context of its span. ``attributes``: for the span of each attempt."""

    __slots__ = ("attempts", "attributes", "context", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context: Context = set_span_in_context(span)
        self.attributes: Attributes = {}
        self.attempts = 0


#: The traced request that a task answers.
Current: TypeAlias = ContextVar[TracedRequest | None]


class Attempt:
    """A request to a worker, until its answer has ended. ``tokens``: the numbers of tokens in the answer."""

    __slots__ = ("span", "tokens")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.tokens: dict[str, int] = {}


class TracingMiddleware:
    """ASGI middleware: a span for each request, but not for probes. The client's ``traceparent`` is the span's parent.

    The application sees the context of this span in the headers.
    """

    def __init__(
        self, app: ASGIApp, tracer: Tracer, current: Current, own: Iterable[re.Pattern[str]]
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._current = current
        literal = {_literal(pattern) for pattern in own}
        self._known = {path.decode() for path in GENERATION_PATHS} | literal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        span = self._tracer.start_span(
            f"{method} {path}" if path in self._known else method,
            _context_of(scope["headers"]),
            SpanKind.SERVER,
            _attributes(scope),
        )
        traced = TracedRequest(span)
        token = self._current.set(traced)
        answer = _Answer(send)
        scope = {**scope, "headers": with_context(scope["headers"], span.get_span_context())}
        try:
            with use_span(span):
                await self._app(scope, receive, answer.send)
        finally:
            self._current.reset(token)
            if answer.status:
                span.set_attribute("http.response.status_code", answer.status)
            if answer.status >= 500:
                span.set_attribute("error.type", str(answer.status))
                span.set_status(StatusCode.ERROR)
            span.end()


class _Answer:
    """Wraps ``send`` and notes the status. ``send_now`` is the server's own, if it has one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.send_now = send_now_of(send)

    async def send(self, message: Message) -> None:
        """Pass ``message`` on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class TracingSender:
    """A Sender that makes a span for each attempt, and sends the span's context to the worker that ``inner`` chose."""

    def __init__(
        self, inner: Sender, tracer: Tracer, current: Current, end: Callable[[Exchange], object]
    ) -> None:
        self._inner = inner
        self._tracer = tracer
        self._current = current
        self._end = end

    def choose(self, exchange: Exchange, but: Collection[Worker] = ()) -> None:
        """Let ``inner`` choose."""
        self._inner.choose(exchange, but)

    async def send(self, exchange: Exchange, request: Request, body: bytes | None = None) -> Reply:
        """Send ``request``."""
        traced, worker = self._current.get(), exchange.worker
        if traced is None or worker is None:
            return await self._inner.send(exchange, request, body)
        if NOTE in exchange.notes:
            exchange.notes[NOTE].span.end()  # the earlier attempt is over
        else:
            exchange.on_close(partial(self._end, exchange))
        span = self._begin(traced, worker, request)
        exchange.notes[NOTE] = Attempt(span)
        # A request may go to two workers at once, so these headers may change while this attempt waits. That is no
        # problem: the proxy reads the headers before its first await.
        request.headers = with_context(request.headers, span.get_span_context())
        try:
            reply = await self._inner.send(exchange, request, body)
        except HTTPError as error:
            span.set_attribute("error.type", error.code)
            span.set_status(StatusCode.ERROR, str(error)[:256])
            raise
        span.set_attribute("http.response.status_code", reply.status)
        if reply.status >= 500:
            span.set_attribute("error.type", str(reply.status))
            span.set_status(StatusCode.ERROR)
        return reply

    def _begin(self, traced: TracedRequest, worker: Worker, request: Request) -> Span:
        traced.attempts += 1
        address = urlsplit(worker.url)
        attributes: Attributes = {
            "http.request.method": request.method,
            "server.address": address.hostname or "",
            "server.port": address.port or (443 if address.scheme == "https" else 80),
            "slime.worker": worker.name,
            **traced.attributes,
        }
        if traced.attempts > 1:
            attributes["http.request.resend_count"] = traced.attempts - 1
        name = span_name(traced.attributes, request.method)
        return self._tracer.start_span(name, traced.context, SpanKind.CLIENT, attributes)


def with_context(headers: Headers, context: SpanContext) -> Headers:
    """Return ``headers`` with the trace context ``context`` in place of their own (W3C Trace Context)."""
    found = [pair for pair in headers if pair[0] not in _CONTEXT_HEADERS]
    if context.is_valid:
        ids = context.trace_id, context.span_id, context.trace_flags
        found.append((b"traceparent", b"00-%032x-%016x-%02x" % ids))
        if context.trace_state:
            found.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
    return found


def _context_of(headers: Headers) -> Context:
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT_HEADERS}
    return _PROPAGATOR.extract(carrier, Context())


def _attributes(scope: Scope) -> Attributes:
    host, port = scope.get("client") or ("", 0)
    return {
        "http.request.method": scope["method"],
        "url.path": scope["raw_path"][:1024].decode("latin-1"),  # without the query, which may have secrets
        "url.scheme": scope["scheme"],
        "client.address": host,
        "client.port": port,
    }


def _literal(pattern: re.Pattern[str]) -> str:
    """Return the path that ``pattern`` matches, the pattern of a route without parameters."""
    return re.sub(r"\\(.)", r"\1", pattern.pattern.removeprefix("^").removesuffix("$"))
