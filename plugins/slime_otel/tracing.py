"""The plugin's hooks, and the provider that sends spans to a collector."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING

import anyio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from router_core import Exchange, hookimpl
from router_core.errors import BadRequest
from router_core.router import Router
from router_core.sender import Sender
from router_core.types import ASGIApp
from slime_logging import hidden_key
from slime_otel.gen_ai import request_attributes, usage_attributes
from slime_otel.spans import NOTE, Attempt, Current, TracingMiddleware, TracingSender
from slime_sglang.bodies import EVENTS, media_type
from slime_sglang.generation import at_generation
from slime_sglang.usage import UsageTap

if TYPE_CHECKING:
    from slime_radix_cache.contracts import RecordedTokens

__all__ = ["Tracing", "provider_for"]

logger = logging.getLogger(__name__)

#: Seconds for an export, and for the last one at the end of the process.
_EXPORT_S, _LAST_S = 5.0, 5.0
_NAME = "slime-router"


class _HashedOnce(Resource):
    """A resource with a cached hash. The exporter asks for the hash with each span; computing it makes a JSON text."""

    _kept_hash: int | None = None

    def __hash__(self) -> int:
        if self._kept_hash is None:
            self._kept_hash = super().__hash__()
        return self._kept_hash


def provider_for(url: str) -> TracerProvider:
    """Return a provider that sends spans to the collector at ``url``, from a thread. Does not connect yet."""
    resource = Resource.create({"service.name": _NAME, "service.version": version(_NAME)})
    provider = TracerProvider(
        resource=_HashedOnce(resource.attributes, resource.schema_url), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_S)))
    logger.info("traces go to %s", url)
    return provider


class Tracing:
    """Traces requests; spans go to ``provider``, which is shut down with the router."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("slime_otel")
        self._current: Current = ContextVar("traced", default=None)
        self._recorded: RecordedTokens | None = None

    @hookimpl
    def setup(self, router: Router) -> None:
        self._router = router

    @hookimpl(tryfirst=True)  # outermost: what is inside sees the context of the span in the headers
    def asgi_middleware(self, app: ASGIApp, router: Router) -> ASGIApp:
        return TracingMiddleware(
            app, self._tracer, self._current, [pattern for pattern, _ in router.own_paths]
        )

    @hookimpl(trylast=True)  # among the innermost: it sees each attempt, and its worker
    def sender(self, inner: Sender) -> Sender:
        return TracingSender(inner, self._tracer, self._current, self._end)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Router) -> AsyncIterator[None]:
        """Send the last spans at the end."""
        self._recorded = router.components.find("verdicts")
        try:
            yield
        finally:
            with anyio.move_on_after(_LAST_S, shield=True):
                await anyio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)

    @hookimpl(tryfirst=True)  # before other plugins change the request
    def pre_request(self, exchange: Exchange) -> None:
        traced = self._current.get()
        if traced is None or exchange.parent is not None:
            return
        traced.attributes = request_attributes(exchange.request)
        if traced.attributes:
            with suppress(BadRequest):  # the plugin that needs the session answers with this error
                session = hidden_key(exchange.session, exchange.request.headers)
                if session is not None:
                    traced.attributes["gen_ai.conversation.id"] = session

    @hookimpl(tryfirst=True)  # called last
    def post_response(self, exchange: Exchange) -> None:
        attempt: Attempt | None = exchange.notes.get(NOTE)
        reply, request, recorded = exchange.reply, exchange.request, self._recorded
        if attempt is None or reply is None or reply.status != 200 or not at_generation(request):
            return
        if recorded is None or recorded.counts(exchange) is None:
            numbered = request.path == "/generate" and media_type(reply) == EVENTS
            reply.tap(UsageTap(attempt.tokens.update, numbered=numbered))

    def _end(self, exchange: Exchange) -> None:
        """End the span of the attempt of ``exchange``."""
        attempt: Attempt | None = exchange.notes.get(NOTE)
        if attempt is None or not attempt.span.is_recording():
            return
        span, recorded = attempt.span, self._recorded
        is_answered = exchange.reply is not None and exchange.reply.status == 200
        counts = recorded.counts(exchange) if recorded is not None and is_answered else None
        span.set_attributes(usage_attributes(attempt.tokens if counts is None else counts._asdict()))
        if recorded is not None and counts is not None:
            reasons = recorded.of(exchange)
            span.set_attribute("slime.exact", not any(reasons))
            if reason := next(filter(None, reasons), None):
                span.set_attribute("slime.inexact_reason", reason)
        span.end()
