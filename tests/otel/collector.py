"""A collector of traces on a real socket, which speaks OTLP over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from routers import Start
from slime_testing import Running, serving

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

__all__ = ["Collector", "Spanned", "traced"]

_KINDS = {2: "server", 3: "client"}


@dataclass(frozen=True)
class Spanned:
    """A span that arrived; ids in hexadecimal digits."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    is_error: bool
    seconds: float
    attributes: dict[str, Any]


@dataclass
class Collector:
    """Keeps the spans that arrive, and the attributes of their resource."""

    spans: list[Spanned] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        """The application, with the usual path."""
        return Starlette(routes=[Route("/v1/traces", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        message = trace_service.ExportTraceServiceRequest.FromString(await request.body())
        for of_resource in message.resource_spans:
            self.resource = _values(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += map(_read, scope.spans)
        return Response(b"", media_type="application/x-protobuf")

    def of_kind(self, kind: str) -> list[Spanned]:
        """The spans of ``kind``, in the order of their ends."""
        return [span for span in self.spans if span.kind == kind]


def _read(span: Any) -> Spanned:
    return Spanned(
        span.name,
        _KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.status.code == 2,
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@asynccontextmanager
async def traced(start: Start, *flags: str) -> AsyncIterator[tuple[Running, Collector]]:
    """A router that traces. The collector has all spans when the block has ended."""
    collector = Collector()
    async with (
        serving(collector.app) as url,
        start("--enable-trace", "--otlp-traces-endpoint", url, *flags) as running,
    ):
        yield running, collector
