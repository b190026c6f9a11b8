"""The numbers at ``/metrics`` are those of the requests, workers and weights."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
from starlette.responses import StreamingResponse
from starlette.routing import Route

from core.real import on_uvicorn
from deadlines import until
from http_.conversations import alone
from metrics.scrapes import EVERYTHING, names_of, scraped
from ports import free_port
from router_core.app import make_app
from router_core.cli import build
from router_core.errors import PluginError, SettingsError, StartupError
from routers import BARE, Start, answering
from slime_http.asgi import ASGIApp, Receive, Scope, Send
from slime_http.serving import serving
from slime_metrics import Metrics
from slime_metrics.counts import Counts
from slime_metrics.histogram import Histogram
from slime_metrics.requests import Measured
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio

METERED = (*BARE, "--plugin", "metrics")


@contextmanager
def log_of(caplog: pytest.LogCaptureFixture, name: str) -> Iterator[None]:
    with caplog.at_level(logging.INFO, name):
        yield


async def test_requests_count_by_path_status_and_worker(start: Start) -> None:
    async with serving(answering(b"{}")) as worker, start(*METERED, "--worker-urls", worker) as running:
        for _ in range(3):
            await running.client.post("/generate", json={})
        await running.client.get("/workers/no-such")
        found = await scraped(running.client)
    assert found["smg_http_requests_total", "method=POST path=/generate"] == 3
    assert found["slime_requests_total", f"path=/generate status=200 worker={worker}"] == 3
    assert found["slime_requests_total", "path=/workers/{worker_id} status=404 worker="] == 1
    assert found["smg_http_responses_total", "error_code=WORKER_NOT_FOUND status_code=404"] == 1
    assert found["smg_http_responses_total", "error_code= status_code=200"] == 3
    assert found["smg_http_request_duration_seconds_count", "method=POST path=/generate"] == 3
    assert found["slime_time_to_worker_seconds_count", "path=/generate"] == 3
    assert found["slime_worker_duration_seconds_count", f"worker={worker}"] == 3


@asynccontextmanager
async def under_uvicorn(app: ASGIApp) -> AsyncIterator[str]:
    context = on_uvicorn("httptools", app)
    yield await anyio.to_thread.run_sync(context.__enter__)
    await anyio.to_thread.run_sync(context.__exit__, None, None, None)


@pytest.mark.parametrize("path", ["/generate", "/sessions/s/generate"])
@pytest.mark.parametrize("server", [serving, under_uvicorn])
async def test_streams_have_a_time_to_first_byte(
    server: Callable[[ASGIApp], AbstractAsyncContextManager[str]], path: str
) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: [{"text": "a", "meta_info": {}}, {"text": "ab", "meta_info": {}}]
    async with serving(engine.app) as worker:
        _, app = build((*BARE, "--plugin", "sessions", "--plugin", "metrics", "--worker-urls", worker))
        async with server(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            streamed = await client.post(path, json={"text": "x", "stream": True})
            assert streamed.text.endswith("[DONE]\n\n")
            found = await scraped(client)
    assert found["smg_router_ttft_seconds_count", "endpoint=generate"] == 1
    assert found["slime_requests_total", f"path=/generate status=200 worker={worker}"] == 1
    assert not [name for name, _ in found if name == "slime_incomplete_answers_total"]


@pytest.mark.parametrize("is_outermost", [True, False])
async def test_servers_one_after_the_other_are_measured(is_outermost: bool) -> None:
    router, app = build(METERED)
    if is_outermost:  # as the command serves it: the server does not call this layer for a request
        app = make_app(router)
    for number in (1, 2):
        async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            await client.get("/workers/no-such")
            found = await scraped(client)
            assert found["slime_requests_total", "path=/workers/{worker_id} status=404 worker="] == number


async def test_server_after_one_that_could_not_start_is_measured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, app = build((*METERED, "--prometheus-host", "127.0.0.1", "--prometheus-port", f"{port}"))
        with pytest.raises(BaseExceptionGroup):
            async with serving(app):
                pass
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await client.get("/workers/no-such")
        found = await scraped(client, f"http://127.0.0.1:{port}/metrics")
    assert found["slime_requests_total", "path=/workers/{worker_id} status=404 worker="] == 1


def test_layer_is_outermost_with_the_default_plugins() -> None:
    router, _ = build([])
    assert next(name for name, _ in router.hooks.asgi_middleware) == "metrics"


async def test_broken_stream_counts_as_incomplete(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: [{"text": "a", "meta_info": {}}] * 3
    engine.hold, engine.hold_after = anyio.Event(), 1
    async with serving(engine.app) as worker, start(*METERED, "--worker-urls", worker) as running:
        async with running.client.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                during = await scraped(running.client)
                break
        await until(lambda: not any(each.in_flight for each in running.router.pool))
        engine.hold.set()
        found = await scraped(running.client)
    assert during["slime_requests_in_flight", ""] == 1
    assert during["smg_worker_requests_active", f"worker={worker}"] == 1
    assert found["slime_requests_in_flight", ""] == 0
    assert found["slime_incomplete_answers_total", f"error=client_gone path=/generate worker={worker}"] == 1
    assert found["slime_worker_failed_attempts_total", f"error=given_up worker={worker}"] == 1


@pytest.mark.parametrize("server", [serving, under_uvicorn])
async def test_answer_that_a_worker_breaks_off_is_incomplete(
    server: Callable[[ASGIApp], AbstractAsyncContextManager[str]],
) -> None:
    engine = FakeEngine()
    half = StreamingResponse(iter([b"half"]), headers={"content-length": "8"})
    engine.app.routes.insert(0, Route("/generate", lambda _: half, methods=["POST"]))
    async with serving(engine.app) as worker:
        _, app = build((*METERED, "--worker-urls", worker))
        async with server(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/generate", json={})
            found = await scraped(client)
    assert found["slime_incomplete_answers_total", f"error=WORKER_BROKE path=/generate worker={worker}"] == 1


async def test_answer_that_the_application_breaks_off_counts_as_internal_error() -> None:
    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("a plugin failed in mid-stream")

    counts = Counts((1.0,), lambda: 0.0)
    measured = Measured(alone(half), counts)
    async with serving(measured.serve) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/generate")
    (series,) = counts.series.values()
    assert series.incomplete == {"INTERNAL_ERROR": 1}


async def test_refused_requests_count_by_code(start: Start) -> None:
    async with start(*METERED, "--api-key", "k") as running:
        assert (await running.client.post("/generate", json={})).status_code == 401
        assert (await running.client.get("/metrics")).status_code == 401
        running.client.headers["authorization"] = "Bearer k"
        assert (await running.client.post("/generate", json={})).status_code == 503
        found = await scraped(running.client)
    assert found["smg_http_responses_total", "error_code=UNAUTHORIZED status_code=401"] == 2
    assert found["smg_http_responses_total", "error_code=NO_WORKER status_code=503"] == 1


async def test_metrics_need_the_admin_key(start: Start) -> None:
    async with start(*METERED, "--api-key", "k", "--admin-api-key", "a") as running:
        as_user = await running.client.get("/metrics", headers={"authorization": "Bearer k"})
        as_admin = await running.client.get("/metrics", headers={"authorization": "Bearer a"})
    assert (as_user.status_code, as_admin.status_code) == (403, 200)


async def test_failed_attempts_and_breakers_count(start: Start) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    retries = ("--plugin", "retries", "--retry-max-retries", "3", "--retry-initial-backoff-ms", "1")
    line = (*METERED, *retries, "--cb-failure-threshold", "3")
    async with start(*line) as running:
        async with serving(answering(b"{}"), port=port):
            assert (await running.client.post("/add_worker", json={"url": url})).status_code == 200
            await until(lambda: running.router.pool.healthy == 1)
        assert (await running.client.post("/generate", json={})).status_code == 502
        found = await scraped(running.client)
    assert found["slime_worker_failed_attempts_total", f"error=WORKER_UNREACHABLE worker={url}"] == 3
    assert found["smg_worker_retries_total", ""] == 2
    assert found["smg_worker_retries_exhausted_total", ""] == 1
    assert found["smg_worker_cb_state", f"worker={url}"] == 1
    assert found["smg_worker_cb_transitions_total", "from=closed to=open"] == 1
    assert found["slime_worker_holds", f"reason=circuit breaker worker={url}"] == 1
    assert found["smg_worker_health", f"worker={url}"] == 0
    assert found["slime_requests_total", f"path=/generate status=502 worker={url}"] == 1


async def test_queue_shows_while_a_request_waits(start: Start) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: {"text": "x", "meta_info": {}}
    engine.delay = anyio.Event()
    limits = ("--plugin", "limits", "--max-concurrent-requests", "1", "--queue-size", "1")
    async with serving(engine.app) as worker, start(*METERED, *limits, "--worker-urls", worker) as running:

        async def ask() -> None:
            await running.client.post("/generate", json={"text": "x"})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(engine.asked) == 1)
            tasks.start_soon(ask)
            while (await scraped(running.client))["slime_requests_queued", ""] < 1:
                pass
            refused = await running.client.post("/generate", json={"text": "x"})
            during = await scraped(running.client)
            engine.delay.set()
        found = await scraped(running.client)
    assert refused.status_code == 429
    assert (during["slime_slots", ""], during["slime_slots_held", ""]) == (1, 1)
    assert found["smg_http_rate_limit_total", "result=allowed"] == 2
    assert found["smg_http_rate_limit_total", "result=rejected"] == 1
    assert found["slime_time_to_worker_seconds_count", "path=/generate"] == 2
    assert found["slime_time_to_worker_seconds_sum", "path=/generate"] > 0


async def test_pause_and_weights_show(start: Start) -> None:
    engine = FakeEngine()
    line = (*METERED, "--plugin", "control")
    async with serving(engine.app) as worker, start(*line, "--worker-urls", worker) as running:
        before = await scraped(running.client)
        await running.client.post("/pause_generation", json={})
        await running.client.post("/weight_version", json={"weight_version": "7"})
        paused = await scraped(running.client)
        await running.client.post("/continue_generation", json={})
        after = await scraped(running.client)
    assert ("slime_weight_version_age_seconds", "") not in before
    assert (paused["slime_generation_paused", ""], after["slime_generation_paused", ""]) == (1, 0)
    assert paused["slime_weight_version", ""] == 7
    assert paused["slime_weight_version_age_seconds", ""] >= 0
    assert paused["slime_weight_version_info", "version=7"] == 1
    assert paused["slime_weight_updates_total", "source=announced"] == 1
    assert paused["slime_worker_other_weights", f"worker={worker}"] == 0
    assert after["smg_http_requests_total", "method=POST path=/pause_generation"] == 1


async def test_prompt_tokens_show_where_they_came_from(start: Start) -> None:
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    rows = (
        ("/generate", {"text": "Hi"}, "encoded"),
        ("/generate", {"input_ids": [72, 105, 33]}, "given"),
        ("/v1/completions", {"prompt": "Good day", "max_tokens": 2}, "encoded"),
        ("/v1/completions", {"prompt": [72, 106, 33], "max_tokens": 2}, "given"),
        ("/v1/chat/completions", chat, "encoded"),
        ("/v1/chat/completions", {**chat, "input_ids": [72, 107, 33]}, "given"),
    )
    before = {"reused": 0.0, "encoded": 0.0, "given": 0.0}
    async with start(*EVERYTHING, "--plugin", "openai") as running:
        for path, body, source in rows:
            answer = await running.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = await scraped(running.client)
            after = {name: found["slime_prompt_tokens_total", f"source={name}"] for name in before}
            assert [name for name in before if after[name] > before[name]] == [source], (path, source)
            before = after
        stats = (await running.client.get("/cache_stats")).json()
    assert before["given"] == stats["tokens_given"] == 9
    assert (before["reused"], before["encoded"]) == (stats["tokens_reused"], stats["tokens_encoded"])
    assert found["smg_router_tokens_total", "token_type=input"] == sum(before.values())


async def test_tokens_and_exactness_show(start: Start) -> None:
    async with start(*EVERYTHING) as running:
        first = (await running.client.post("/generate", json={"text": "Hi", "session_id": "s"})).json()
        text = "Hi" + first["text"]
        asked = {"text": text + " Go on.", "session_id": "s"}
        async with running.client.stream("POST", "/generate", json={**asked, "stream": True}) as answer:
            events = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        exact = (await running.client.post("/retrieve_from_text", json={"text": text})).json()
        await running.client.post("/retrieve_from_text", json={"text": "never heard"})
        await running.client.post("/generate", json={"nonsense": True})
        found = await scraped(running.client)
        stats = (await running.client.get("/cache_stats")).json()
    assert exact["exact"] is True
    assert events
    assert found["smg_router_tokens_total", "token_type=output"] == stats["tokens"] - sum(
        found["slime_prompt_tokens_total", f"source={source}"] for source in ("encoded",)
    )
    assert found["slime_prompt_tokens_total", "source=reused"] == stats["tokens_reused"] > 0
    assert found["slime_cache_prompts_total", "result=hit"] == 1
    assert found["slime_cache_hit_rate", ""] == 0.5
    assert found["slime_retrieved_answers_total", "reason=exact"] == 1
    assert (
        sum(value for (name, _), value in found.items() if name == "slime_untouched_generations_total") == 1
    )


async def test_port_of_its_own_needs_no_key(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    line = ("--api-key", "k", "--prometheus-host", "127.0.0.1", "--prometheus-port", f"{port}")
    with log_of(caplog, "slime_metrics"):
        async with start(*METERED, *line), httpx.AsyncClient(trust_env=False) as client:
            found = await scraped(client, f"http://127.0.0.1:{port}/metrics")
            other = await client.get(f"http://127.0.0.1:{port}/workers")
    assert found["slime_requests_in_flight", ""] == 0
    assert other.status_code == 404
    assert f"metrics at http://127.0.0.1:{port}/metrics" in caplog.text


async def test_taken_port_ends_the_start(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BaseExceptionGroup) as failed:
            async with start(*METERED, "--prometheus-host", "127.0.0.1", "--prometheus-port", f"{port}"):
                pass
    assert failed.group_contains(StartupError, depth=None) if hasattr(failed, "group_contains") else True


async def test_open_metrics_for_a_scraper_that_asks(start: Start) -> None:
    async with start(*METERED) as running:
        accept = {"accept": "application/openmetrics-text;version=1.0.0"}
        answer = await running.client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


async def test_each_metric_is_in_the_page(start: Start) -> None:
    """With its type, and nothing else is."""
    page = (Path(__file__).parents[2] / "docs" / "plugins" / "metrics.md").read_text()
    rows = [
        line.split(" | ")
        for line in page.splitlines()
        if line.startswith(("| `smg_", "| `slime_", "| `process"))
    ]
    told = {name.strip("`"): row[1] for row in rows for name in row[0].removeprefix("| ").split(", ")}
    told = {name: kind.strip(" |") for name, kind in told.items()}
    flags: tuple[str, ...] = ("--policy", "auto", "--kv-events")
    if find_spec("zmq") is None:
        flags = flags[:2]
        told = {name: kind for name, kind in told.items() if not name.startswith("slime_kv_events_")}
    async with start(*EVERYTHING, *flags) as running:
        exposed = names_of((await running.client.get("/metrics")).text)
    assert sorted(told) == sorted(exposed)
    assert {name: kind for name, kind in told.items() if kind} == {
        name: kind for name, kind in exposed.items() if told[name]
    }


# the parts


def test_buckets_come_from_the_command_line() -> None:
    router, _ = build(["--prometheus-duration-buckets", "0.5", "2"])
    assert router.options.prometheus_duration_buckets == [0.5, 2.0]
    for wrong in (["2", "1"], ["0", "1"], ["-1"], ["nan"], ["1", "inf"]):
        with pytest.raises(SettingsError, match="--prometheus-duration-buckets: wanted"):
            build(["--prometheus-duration-buckets", *wrong])


def test_a_plugin_that_fails_loses_only_its_metric(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.gauge("broken", "Fails.", lambda: 1 / 0)
    metrics.gauge("good", "Works.", lambda: 2)
    text = metrics.written(metrics.collect(), "")[0].decode()
    assert "\ngood 2.0\n" in text
    assert "broken" not in text
    assert "the metric broken is left out" in caplog.text


def test_names_are_checked() -> None:
    metrics = Metrics()
    metrics.gauge("one", "One.", lambda: 1)
    with pytest.raises(PluginError, match="registered twice"):
        metrics.gauge("one", "One.", lambda: 1)
    with pytest.raises(PluginError, match="ends in _total"):
        metrics.counter("two", "Two.", lambda: 1)
    with pytest.raises(PluginError, match="wanted lower-case letters"):
        metrics.gauge("a-b", "Three.", lambda: 1)


def test_series_beyond_the_limit_are_summed() -> None:
    metrics = Metrics()
    metrics.counter("many_total", "Many.", lambda: {f"{number}": 1 for number in range(1500)}, ["kind"])
    lines = [
        line
        for line in metrics.written(metrics.collect(), "")[0].decode().splitlines()
        if "many_total{" in line
    ]
    assert len(lines) == 1001
    assert 'many_total{kind="other"} 500.0' in lines


def test_waits_are_apart_from_the_time_at_the_worker() -> None:
    counts = Counts((0.1, 1.0), lambda: 0.0)
    counts.worker_added("http://w")
    series = counts.of("POST", "/generate", 200, "http://w")
    series.observe(3.0, 2.5)
    series.observe(0.05, 0.0)
    assert (series.whole.counts, series.whole.total_s) == ([1, 0, 1], 3.05)
    assert (series.to_worker.counts, series.to_worker.total_s) == ([1, 0, 1], 2.5)
    assert series.at_worker.counts == [1, 1, 0]
    assert series.at_worker.total_s == pytest.approx(0.55)


def test_numbers_of_removed_workers_are_added_up() -> None:
    now = 0.0
    counts = Counts((1.0,), lambda: now)
    for number in range(300):
        url = f"http://w{number}"
        counts.worker_added(url)
        counts.of("POST", "/generate", 200, url).whole.observe(0.5)
        counts.failure(url, "WORKER_BROKE")
        counts.worker_removed(url)
    assert len(counts.series) == 101
    assert sum(series.whole.count for series in counts.series.values()) == 300
    now = 700.0
    counts.tidy()
    assert [kind.worker for kind in counts.series] == ["removed"]
    assert counts.failed == {("removed", "WORKER_BROKE"): 300}
    late = counts.of("POST", "/generate", 200, "http://w299")  # its last request ends after all
    assert late is next(iter(counts.series.values()))


def test_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for duration_s in (0.05, 0.1, 0.2, 1.0, 5.0):
        histogram.observe(duration_s)
    assert (histogram.counts, histogram.count) == ([2, 2, 1], 5)


def test_histogram_counts_many_durations_as_one_by_one() -> None:
    bounds, chance = (0.1, 0.2, 0.5, 1.0), random.Random(3)
    one_by_one, together = Histogram(bounds), Histogram(bounds)
    durations_s = [chance.choice((0.0, 0.1, 0.15, 0.2, 0.3, 0.7, 1.0, 9.0)) for _ in range(700)]
    for duration_s in durations_s:
        one_by_one.observe(duration_s)
    for start, end in ((0, 1), (1, 400), (400, 400), (400, 700)):
        together.observe_all(np.array(durations_s[start:end]))
    assert together.counts == one_by_one.counts
    assert together.total_s == pytest.approx(one_by_one.total_s)
    assert together.count == 700
