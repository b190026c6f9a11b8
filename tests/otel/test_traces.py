"""Traces of requests: their spans, as a collector gets them, and the context that workers get."""

from __future__ import annotations

import argparse
import builtins
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from access_log.lines import fields_of
from deadlines import until
from openai_.chat.scripted import scripted
from otel.collector import Collector, traced
from plugged import Recording, routing
from ports import free_port
from router_core.cli import main
from router_core.errors import SettingsError
from router_core.flags import add_flags
from routers import Start
from slime_otel.settings import Settings
from slime_testing import FakeEngine, Running, serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

pytestmark = pytest.mark.anyio

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
EXACT = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache", "--plugin", "openai")


def output(text: str, **meta: int) -> dict[str, Any]:
    return {"text": text, "output_ids": [1], "meta_info": {"finish_reason": None, **meta}}


def parent_of(headers: Any) -> tuple[str, str]:
    """The trace and the span in the ``traceparent`` of ``headers``."""
    _, trace, span, _ = headers["traceparent"].split("-")
    return trace, span


@asynccontextmanager
async def before(start: Start, engine: FakeEngine, *flags: str) -> AsyncIterator[tuple[Running, Collector]]:
    async with (
        serving(engine.app) as url,
        traced(start, "--disable-health-check", "--worker-urls", url, *flags) as (running, collector),
    ):
        yield running, collector


async def test_generation_has_a_span_below_the_clients_and_one_for_its_worker(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a", prompt_tokens=3, completion_tokens=1, cached_tokens=2)
    sampling = {"max_new_tokens": 8, "temperature": 0.5, "top_p": True}
    body = {"text": "secret", "session_id": "s", "sampling_params": sampling}
    async with before(start, engine) as (running, collector):
        await running.client.post("/generate?key=secret", json=body, headers=CONTEXT)
        (worker,) = running.router.pool
    (server,), (client,) = collector.of_kind("server"), collector.of_kind("client")
    assert (server.name, client.name) == ("POST /generate", "text_completion")
    assert (server.trace_id, server.parent_id) == (client.trace_id, SPAN) == (TRACE, SPAN)
    assert client.parent_id == server.span_id
    assert parent_of(engine.headers[0]) == (TRACE, client.span_id)
    assert engine.headers[0]["tracestate"] == "vendor=1"
    assert 0 < client.seconds < server.seconds
    assert not server.is_error
    assert not client.is_error
    assert (
        server.attributes.items()
        >= {
            "http.request.method": "POST",
            "url.path": "/generate",
            "http.response.status_code": 200,
            "client.address": "127.0.0.1",
        }.items()
    )
    assert client.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": int(worker.url.rpartition(":")[2]),
        "slime.worker": worker.url,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "sglang",
        "gen_ai.conversation.id": "s",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }
    assert collector.resource["service.name"] == "slime-router"
    assert "secret" not in str(collector)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_has_the_span_of_its_generation_with_exact_tokens(start: Start, stream: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "messages": messages, "max_tokens": 5, "stream": stream, "ignore_eos": True}
    async with traced(start, *EXACT) as (running, collector):
        answer = await running.client.post("/v1/chat/completions", json=body, headers=CONTEXT)
        assert answer.status_code == 200
    (server,), (client,) = collector.of_kind("server"), collector.of_kind("client")
    assert (server.name, client.name) == ("POST /v1/chat/completions", "chat m")
    assert (client.trace_id, client.parent_id) == (TRACE, server.span_id)
    told = client.attributes
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.usage.output_tokens"]) == (5, 5)
    assert told["slime.exact"] is True
    assert client.seconds <= server.seconds


async def test_answer_that_is_not_exact_has_the_reason(start: Start) -> None:
    wrong = output("a", prompt_tokens=99, completion_tokens=1)
    collector = Collector()
    async with serving(collector.app) as url:
        flags = ("--enable-trace", "--otlp-traces-endpoint", url)
        async with scripted(start, wrong, flags=flags) as (running, _):
            await running.client.post("/generate", json={"text": "Hello"})
    (client,) = collector.of_kind("client")
    assert client.attributes["slime.exact"] is False
    assert client.attributes["slime.inexact_reason"] == "engine_contradicts_itself"


async def test_each_attempt_has_a_span(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    gone = f"http://127.0.0.1:{free_port()}"
    async with before(start, engine, "--policy", "round_robin") as (running, collector):
        worker, _ = await running.router.add_worker(gone)
        running.router.pool.release(worker, "joining")
        for _ in range(2):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
    (failed,) = [span for span in collector.of_kind("client") if span.is_error]
    (good,) = [span for span in collector.of_kind("client") if "http.request.resend_count" in span.attributes]
    assert (failed.attributes["slime.worker"], failed.attributes["error.type"]) == (
        gone,
        "WORKER_UNREACHABLE",
    )
    assert (good.parent_id, good.attributes["http.request.resend_count"]) == (failed.parent_id, 1)
    assert good.span_id in [parent_of(headers)[1] for headers in engine.headers]


async def test_stream_that_its_client_leaves_ends_its_spans(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: [output("a"), output("b")]
    engine.hold, engine.hold_after = anyio.Event(), 1
    async with before(start, engine) as (running, collector):
        body = {"text": "a", "stream": True}
        async with running.client.stream("POST", "/generate", json=body) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        engine.hold.set()
    assert [span.kind for span in collector.spans] == ["client", "server"]


async def test_refusals_have_spans_and_probes_have_none(start: Start) -> None:
    async with traced(start, "--api-key", "k") as (running, collector):
        await running.client.get("/health")
        await running.client.post("/generate", json={}, headers={"traceparent": "nonsense"})
        await running.client.post("/generate", json={}, headers={"authorization": "Bearer k"})
        await running.client.get("/any/path", headers={"authorization": "Bearer k"})
    assert [(span.name, span.attributes["http.response.status_code"]) for span in collector.spans] == [
        ("POST /generate", 401),
        ("POST /generate", 503),
        ("GET", 503),
    ]
    assert [span.is_error for span in collector.spans] == [False, True, True]
    assert collector.spans[0].parent_id == ""


async def test_sampling_decision_of_the_client_counts(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    async with before(start, engine) as (running, collector):
        unsampled = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        await running.client.post("/generate", json={"text": "a"}, headers=unsampled)
    assert collector.spans == []
    assert engine.headers[0]["traceparent"].startswith(f"00-{TRACE}-")
    assert engine.headers[0]["traceparent"].endswith("-00")


async def test_spans_of_a_plugin_are_below_that_of_the_request() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from router_core import hookimpl
    from slime_otel.tracing import Tracing

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    class Plugin:
        @hookimpl
        def pre_request(self) -> None:
            provider.get_tracer("a plugin").start_span("mine").end()

    async with routing({"otel": Tracing(provider), "own": Plugin()}, Recording()) as running:
        await running.client.post("/generate", json={})
    mine, client, server = exporter.get_finished_spans()
    assert (mine.name, client.name, server.name) == ("mine", "text_completion", "POST /generate")
    assert mine.parent is not None
    assert mine.parent.span_id == server.context.span_id


async def test_without_the_flag_the_context_of_the_client_is_passed_on(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    async with serving(engine.app) as url, start("--worker-urls", url) as running:
        await running.client.post("/generate", json={"text": "a"}, headers=CONTEXT)
        hooks = running.router.hooks
        assert "otel" not in {name for name, _ in [*hooks.asgi_middleware, *hooks.sender]}
    assert {name: engine.headers[0][name] for name in CONTEXT} == CONTEXT


async def test_collector_that_is_down_delays_no_request_and_no_end(start: Start) -> None:
    down = f"127.0.0.1:{free_port()}"
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    with anyio.fail_after(30):
        async with (
            serving(engine.app) as url,
            start("--enable-trace", "--otlp-traces-endpoint", down, "--worker-urls", url) as running,
        ):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:4317", "http://localhost:4318/v1/traces"),
        ("localhost", "http://localhost:4318/v1/traces"),
        ("[::1]:4317", "http://[::1]:4318/v1/traces"),
        ("http://collector:4317/", "http://collector:4318/v1/traces"),
        ("collector:9999", "http://collector:9999/v1/traces"),
        ("https://collector", "https://collector/v1/traces"),
        ("https://collector:4317/otlp/v1/traces", "https://collector:4317/otlp/v1/traces"),
    ],
)
def test_endpoint_is_a_url_or_that_of_a_launch_line(given: str, url: str) -> None:
    assert Settings(enabled=True, endpoint=given).url == url


@pytest.mark.parametrize("given", ["", "grpc://collector:4317", "collector:port", "http://"])
def test_endpoint_that_is_none_is_refused(given: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    options = parser.parse_args(["--enable-trace", f"--otlp-traces-endpoint={given}"])
    with pytest.raises(SettingsError, match="--otlp-traces-endpoint: wanted HOST:PORT or http"):
        Settings.from_options(options)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return found(name, *rest)

    for name in ("slime_otel.tracing", "slime_otel.spans"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["--enable-trace"]) == 2
    assert "--enable-trace needs OpenTelemetry: pip install 'slime-router[otel]'" in capsys.readouterr().err


async def test_request_log_has_the_trace(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async with traced(start, "--access-log") as (running, collector):
        await running.client.get("/workers")
        await running.client.get("/workers", headers=CONTEXT)
    assert [line["trace_id"] for line in fields_of(caplog)] == [span.trace_id for span in collector.spans]
    assert collector.spans[1].trace_id == TRACE


async def test_each_worker_of_a_pair_has_a_span_of_its_own(start: Start) -> None:
    prefill, decode = FakeEngine(), FakeEngine()
    for engine in (prefill, decode):
        engine.rest = lambda _: output("a", prompt_tokens=3, completion_tokens=1)
    async with serving(prefill.app) as first, serving(decode.app) as second:
        pair = ("--pd-disaggregation", "--prefill", first, "none", "--decode", second)
        async with traced(start, "--disable-health-check", *pair) as (running, collector):
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
    spans = {span.attributes["slime.worker"]: span for span in collector.of_kind("client")}
    assert spans.keys() == {first, second}
    told = {first: prefill, second: decode}
    for url, span in spans.items():
        assert parent_of(told[url].headers[0]) == (span.trace_id, span.span_id)
