"""The line of a request: worker, times, tokens and outcome, on real sockets."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from access_log.lines import fields_of, last_line
from compatibility.launching import launched
from deadlines import until
from openai_.chat.scripted import scripted
from ports import free_port
from router_core.router import Router
from routers import Start
from slime_access_log.middleware import Logged
from slime_http.asgi import Message, Receive, Scope, Send, send_now_of
from slime_logging import JsonLines, TextLines
from slime_testing import FakeEngine, Running, serving

pytestmark = pytest.mark.anyio

EXACT = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache", "--plugin", "openai")
SAMPLING = {"max_new_tokens": 8, "ignore_eos": True}


def output(text: str, **meta: int) -> dict[str, Any]:
    return {"text": text, "output_ids": [1], "meta_info": {"finish_reason": None, **meta}}


@asynccontextmanager
async def before(
    start: Start, engine: FakeEngine, *flags: str
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    async with (
        serving(engine.app) as url,
        start("--access-log", "--disable-health-check", "--worker-urls", url, *flags) as running,
    ):
        yield running, running.client


async def test_line_of_a_generation_has_session_worker_times_and_exact_tokens(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start("--access-log", *EXACT) as running:
        body = {"text": "Hello", "sampling_params": SAMPLING, "session_id": "s"}
        for _ in range(2):
            answer = await running.client.post("/generate", json=body)
        (worker,) = running.router.pool
    first, line = fields_of(caplog)
    assert answer.headers["x-request-id"] == line["id"] != first["id"]
    told = ("method", "path", "status", "outcome", "session", "worker", "completion_tokens", "exact")
    assert [line[name] for name in told] == ["POST", "/generate", 200, "complete", "s", worker.url, 8, True]
    assert (first["reused_tokens"], line["reused_tokens"]) == (0, line["prompt_tokens"])
    assert 0 < line["to_worker_s"] < line["first_byte_s"] <= line["duration_s"]
    assert line["bytes"] == len(answer.content)
    assert line["client"].startswith("127.0.0.1:")
    assert not {"attempts", "failed", "queue_s", "pause_s", "error", "caller", "inexact_reason"} & line.keys()


@pytest.mark.parametrize("stream", [False, True])
async def test_line_of_a_chat_has_the_tokens_of_all_its_answers(
    start: Start, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 5, "n": 2, "stream": stream, "ignore_eos": True}
    async with start("--access-log", *EXACT) as running:
        await running.client.post("/v1/chat/completions", json=body)
    (line,) = fields_of(caplog)
    assert (line["path"], line["completion_tokens"], line["exact"]) == ("/v1/chat/completions", 10, True)
    assert line["worker"].startswith("http://127.0.0.1:")


async def test_engine_gets_the_id_that_the_line_has(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    given = {"x-trace-id": "of mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with before(start, engine) as (_, client):
        answer = await client.post("/generate", json={"text": "a"}, headers=given)
        await client.get("/health", headers={"traceparent": "nonsense"})
    line, other = fields_of(caplog)
    assert (line["trace_id"], "trace_id" in other) == ("a" * 32, False)
    assert line["id"] == answer.headers["x-request-id"] == engine.headers[0]["x-trace-id"] == "of mine"


async def test_headers_of_ids_are_those_of_their_flag(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async with before(start, FakeEngine(), "--request-id-headers", "x-mine") as (_, client):
        await client.get("/health", headers={"x-mine": "mine", "x-trace-id": "no"})
    assert [line["id"] for line in fields_of(caplog)] == ["mine"]


async def test_tokens_are_the_engines_if_none_are_recorded(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    events = [output("a", prompt_tokens=3, completion_tokens=n, cached_tokens=2) for n in (1, 2)]
    forged = output('"prompt_tokens":9,"completion_tokens":9,', prompt_tokens=3, completion_tokens=1)
    engine.script = [events, events[0], [events, events], forged, events[0]]
    engine.pieces = 7
    async with before(start, engine) as (_, client):
        for stream, batch in ((True, False), (False, False), (True, True), (False, False)):
            body: dict[str, Any] = {"text": ["a", "b"] if batch else "a", "stream": stream}
            await client.post("/generate", json=body)
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    found = [tuple(line.get(name) for name in names) for line in fields_of(caplog)]
    assert found == [(3, 2, 2), (3, 1, 2), (None, None, None), (3, 1, None)]
    assert not any("exact" in line for line in fields_of(caplog))


async def test_answer_that_is_not_exact_has_the_reason(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = output("a", prompt_tokens=99, completion_tokens=1)
    async with scripted(start, wrong, flags=("--access-log",)) as (running, engine):
        engine.answers["/v1/messages"] = (200, b'{"usage": {"input_tokens": 7, "output_tokens": 2}}')
        await running.client.post("/generate", json={"text": "Hello"})
        await running.client.post("/v1/messages", json={})
        engine.script.append((400, b'{"error":{"message":"no"}}'))
        await running.client.post("/generate", json={"text": "Hello"})
    recorded, untouched, failed = fields_of(caplog)
    assert not {"exact", "inexact_reason", "prompt_tokens"} & failed.keys()
    assert (recorded["exact"], recorded["inexact_reason"]) == (False, "engine_contradicts_itself")
    assert (untouched["exact"], untouched["prompt_tokens"], untouched["completion_tokens"]) == (False, 7, 2)


async def test_refused_request_has_a_line_with_the_reason(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ("--api-key", "k", "--control-plane-api-keys", "ann:Ann:user:n")
    async with before(start, FakeEngine(), *keys) as (_, client):
        await client.post("/generate", json={}, headers={"authorization": "Bearer wrong"})
        await client.get("/workers", headers={"authorization": "Bearer n"})
    found = [(line["status"], line.get("error"), line.get("caller")) for line in fields_of(caplog)]
    assert found == [(401, "UNAUTHORIZED", None), (403, "FORBIDDEN", "ann")]
    assert all("worker" not in line for line in fields_of(caplog))


async def test_waits_for_a_slot_and_for_a_pause_are_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    async with before(start, engine, "--max-concurrent-requests", "1") as (running, client):
        gate = running.router.components.get("pending_aborts").gate
        gate.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post("/generate", json={"text": "a"}))
            await until(lambda: gate.waiting == 1)
            tasks.start_soon(lambda: client.post("/generate", json={"text": "b"}))
            await until(lambda: "requests wait: all 1 slots are in use" in caplog.text)
            await anyio.sleep(0.02)
            gate.open()
    first, second = fields_of(caplog)
    assert 0.01 < first["pause_s"] <= first["to_worker_s"]
    assert 0.01 < second["queue_s"] <= second["to_worker_s"]
    assert "queue_s" not in first


async def test_attempts_and_failed_workers_are_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    gone = f"http://127.0.0.1:{free_port()}"
    flags = ("--retry-initial-backoff-ms", "1", "--policy", "round_robin")
    async with before(start, engine, *flags) as (running, client):
        worker, _ = await running.router.add_worker(gone)
        running.router.pool.release(worker, "joining")
        for _ in range(2):
            assert (await client.post("/generate", json={"text": "a"})).status_code == 200
    (line,) = [line for line in fields_of(caplog) if "failed" in line]
    assert (line["attempts"], line["failed"]) == (2, [f"{gone} WORKER_UNREACHABLE"])
    assert line["workers"] == [gone, line["worker"]]


async def test_client_that_hangs_up_and_answer_that_breaks_off_are_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: [output("a"), output("b")]
    engine.hold, engine.hold_after = anyio.Event(), 1
    body = {"text": "a", "stream": True}
    async with before(start, engine) as (_, client):
        async with client.stream("POST", "/generate", json=body) as answer:
            await anext(answer.aiter_bytes())
        await until(lambda: len(fields_of(caplog)) == 1)
        engine.hold, engine.events_sent = None, 1

        async def cut(_body: dict[str, Any]) -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            raise ConnectionError("a test")

        engine._stream = lambda outputs, hold: cut({})  # type: ignore[method-assign]  # breaks off within its answer
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/generate", json=body)
    assert [(line["status"], line["outcome"]) for line in fields_of(caplog)] == [
        (200, "client_gone"),
        (200, "broke_off"),
    ]


async def test_no_line_has_a_secret(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: output("a")
    headers = {"authorization": "Bearer sec-ret-of-client", "cookie": "sec-ret"}
    async with before(start, engine, "--session-from-api-key", "--worker-api-key", "sec-ret-w") as (
        _,
        client,
    ):
        await client.post("/generate?key=sec-ret", json={"text": "sec-ret"}, headers=headers)
        await client.get("/workers?key=sec-ret", headers=headers)
    first, second = fields_of(caplog)
    assert first["session"].startswith("key:")
    assert (first["path"], second["path"]) == ("/generate", "/workers")
    for form in (TextLines(), JsonLines()):
        assert not [line for record in caplog.records if "sec-ret" in (line := form.format(record))]


async def test_finished_request_leaves_nothing_to_the_garbage_collector() -> None:
    class Server:
        async def receive(self) -> Message:
            return {"type": "http.disconnect"}

        async def send(self, message: Message) -> None: ...

        def send_now(self, piece: bytes, before: Any) -> bool:
            return True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        send_now = send_now_of(send)
        assert send_now is not None
        send_now(b"b", ())

    server = Server()
    gone = weakref.ref(server)
    scope: Scope = {"type": "http", "method": "GET", "raw_path": b"/", "headers": [], "client": None}
    gc.disable()
    try:
        await Logged(app, ContextVar("record", default=None))(scope, server.receive, server.send)
        del server
        assert gone() is None
    finally:
        gc.enable()


async def test_client_forges_no_line(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    odd = "s \u2028\x85 status=200"
    async with before(start, FakeEngine()) as (_, client):
        await client.get("/a%0aERROR%20forged", headers={"x-request-id": 'a" status=200'})
        await client.post("/generate", json={"session_id": odd, "text": "a"})
    lines = [TextLines().format(record) for record in caplog.records if record.name == "slime_access_log"]
    assert all(len(line.splitlines()) == 1 for line in lines)
    assert r'id="a\" status=200"' in lines[0]
    assert "path=/a%0aERROR%20forged" in lines[0]
    assert r'session="s \u2028\u0085 status=200"' in lines[1]
    assert json.loads(JsonLines().format(last_line(caplog)))["session"] == odd


async def test_without_the_flag_requests_have_no_line_and_no_id(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as running:
        answer = await running.client.get("/health")
        assert "request_log" not in running.router.components
    assert "x-request-id" not in answer.headers
    assert fields_of(caplog) == []
    assert _plugins(running.router).isdisjoint({"access_log"})


def _plugins(router: Router) -> set[str]:
    hooks = router.hooks
    return {name for name, _ in [*hooks.pre_request, *hooks.asgi_middleware, *hooks.sender, *hooks.setup]}


async def test_json_log_of_a_process_tells_the_story_of_an_operator(tmp_path: Path) -> None:
    words = ["--access-log", "--log-format", "json", "--log-level", "warn", "--log-dir", "logs", *EXACT]
    async with launched(words, tmp_path) as router:
        body = {"text": "Hello", "sampling_params": SAMPLING}
        assert (await router.client.post("/generate", json=body)).status_code == 200
        for number in range(20):  # SIGTERM follows at once
            await router.client.get(f"/workers/none-{number}")
    lines = [json.loads(line) for line in (tmp_path / "logs" / "slime-router.log").read_text().splitlines()]
    (line,) = [line for line in lines if line.get("path") == "/generate"]
    assert [line["path"] for line in lines if line.get("status") == 404] == [
        f"/workers/none-{number}" for number in range(20)
    ]
    assert (line["message"], line["level"], line["completion_tokens"]) == ("request", "INFO", 8)
    assert {each["logger"] for each in lines if each["level"] == "INFO"} == {"slime_access_log"}


async def test_both_workers_of_a_pair_are_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = FakeEngine(), FakeEngine()
    for engine in (prefill, decode):
        engine.rest = lambda _: output("a", prompt_tokens=3, completion_tokens=1)
    async with serving(prefill.app) as first, serving(decode.app) as second:
        pair = ("--pd-disaggregation", "--prefill", first, "none", "--decode", second)
        async with start("--access-log", "--disable-health-check", *pair) as running:
            assert (await running.client.post("/generate", json={"text": "a"})).status_code == 200
    (line,) = fields_of(caplog)
    assert set(line["workers"]) == {first, second}
    assert (line["attempts"], line["prompt_tokens"], line["completion_tokens"]) == (2, 3, 1)
