"""Workers that are only proxied to: a server with vLLM's protocol, and all plugins that know SGLang's before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deadlines import HANG_S
from plugged import until
from routers import Start, answering
from slime_control.calls.endpoints import CALLS
from slime_engine.model import load_model
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio

# Spaces, and fields that the openai plugin would refuse or drop: another encoder would not give these bytes back.
ASKED = (
    b'{ "model": "m",  "messages": [{"role": "user", "content": "Hi"}], "guided_regex": "a", "top_k":1.50 }'
)
ANSWER = (
    b'{ "id": "c-1", "choices": [ {"index": 0, "message": {"content": "Hi."}} ],  "weight_version": "9" }'
)
EVENTS = [b'data:  {"choices": [{"delta": {"content": "Hi"}}]}\n\n', b"data: [DONE]\n\n"]
WRONG = b'{"object": "error", "message": "no such model", "code": 404}'


class VLLM:
    """As much of a vLLM server as a router meets, which keeps what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str, bytes]] = []
        self.left = anyio.Event()
        self.well = True
        models = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}
        self._fixed = {"/version": {"version": "0.11.0"}, "/v1/models": models}
        self.app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT"])])

    async def _answer(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        if path == "/health":
            return Response(status_code=200 if self.well else 500)
        self.got.append((request.method, path, body))
        if path in self._fixed:
            return JSONResponse(self._fixed[path])
        if path == "/metrics":
            return Response("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 2\n")
        if path not in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
            return Response(WRONG, 404, media_type="application/json")
        if b"endless" in body:
            return StreamingResponse(self._endless(), media_type="text/event-stream")
        if b'"stream"' in body:
            return StreamingResponse(iter(EVENTS), media_type="text/event-stream")
        return Response(ANSWER, media_type="application/json")

    async def _endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield EVENTS[0]
                await anyio.sleep(0.01)
        finally:
            self.left.set()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.got]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    load_model().tokenizer.save(path)
    return str(path)


@asynccontextmanager
async def proxying(start: Start, checkpoint: str, *flags: str) -> AsyncIterator[tuple[Running, VLLM]]:
    """A router with everything that knows SGLang, and one vLLM server that was registered as it should be."""
    worker = VLLM()
    plugins = (
        "--plugin",
        "radix_cache",
        "--hf-checkpoint",
        checkpoint,
        "--plugin",
        "openai",
        "--plugin",
        "r3",
    )
    async with serving(worker.app, grace_s=0.1) as url, start(*plugins, *flags) as running:
        added = await running.client.post("/workers", json={"url": url, "worker_type": "passthrough"})
        assert (added.status_code, "warning" in added.json()) == (202, False)
        assert worker.got == [], "it was asked for its health, and nothing of SGLang's"
        yield running, worker


@pytest.mark.parametrize("flags", [(), ("--intra-node-data-parallel-size", "2")], ids=["", "ranks"])
async def test_openai_requests_pass_byte_for_byte(
    start: Start, checkpoint: str, flags: tuple[str, ...]
) -> None:
    async with proxying(start, checkpoint, *flags) as (running, worker):
        for path in ("/v1/chat/completions", "/v1/completions"):
            whole = await running.client.post(path, content=ASKED)
            assert (whole.status_code, whole.content) == (200, ANSWER)
            assert whole.headers["x-slime-exact"] == "false"
            asked = ASKED.replace(b'"m"', b'"m", "stream": true')
            async with running.client.stream("POST", path, content=asked) as streamed:
                assert await streamed.aread() == b"".join(EVENTS)
            assert worker.got[-2:] == [("POST", path, ASKED), ("POST", path, asked)]
        assert (await running.client.get("/v1/models")).json()["data"][0]["owned_by"] == "vllm"
        refused = await running.client.post("/v1/embeddings", content=b"{}")
        assert (refused.status_code, refused.content) == (404, WRONG)
        one = (await running.client.get("/workers")).json()
        assert one["stats"]["passthrough_count"] == (2 if flags else 1)
        assert one["workers"][0]["weight_version"] is None
        assert (await running.client.get("/readiness")).status_code == 200


async def test_nothing_of_it_is_recorded(start: Start, checkpoint: str) -> None:
    headers = {"x-session-id": "s"}
    async with proxying(start, checkpoint) as (running, worker):
        await running.client.post("/v1/chat/completions", content=ASKED, headers=headers)
        raw = b'{"text": "Hi",  "sampling_params": {}}'
        await running.client.post("/generate", content=raw, headers=headers)
        assert worker.got[-1] == ("POST", "/generate", raw)
        found = await running.client.get("/trajectories/s")
        told = (await running.client.post("/retrieve_from_text", json={"text": "Hi"}, headers=headers)).json()
        stats = (await running.client.get("/cache_stats")).json()
    assert found.status_code == 404
    assert told["exact"] is False
    assert stats["entries"] == 0


async def test_a_session_that_generates_by_a_path_of_its_own_is_not_complete(
    start: Start, checkpoint: str
) -> None:
    """vLLM's ``/inference/v1/generate``, which prime-rl asks: tokens in, tokens out."""
    async with proxying(start, checkpoint) as (running, worker):
        await running.client.post("/sessions", json={"session_id": "s"})
        for path, is_exact in (
            ("/v1/models", "false"),
            ("/inference/v1/generate", "false"),
            ("/version", None),
        ):
            method = "POST" if "generate" in path else "GET"
            answer = await running.client.request(method, path, headers={"x-session-id": "s"})
            assert (answer.status_code, answer.headers.get("x-slime-exact")) == (200, is_exact)
            shown = (await running.client.get("/sessions/s")).json()
            assert shown["metadata"]["complete"] is ("generate" not in str(worker.paths()))
        assert (await running.client.post("/sessions/s/samples")).status_code == 422


async def test_control_calls_reach_nobody(start: Start, checkpoint: str) -> None:
    async with proxying(start, checkpoint) as (running, worker):
        for path in CALLS:
            answer = await running.client.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "PASSTHROUGH_WORKERS")
            assert "Control each server itself" in answer.json()["error"]["message"]
        for path in ("/pause", "/sleep", "/update_weights", "/abort_requests"):
            assert (await running.client.post(path)).status_code == 501
        assert worker.got == []
        metrics = await running.client.get("/engine_metrics")
        assert "num_requests_running" in metrics.text


async def test_a_client_that_leaves_closes_the_connection(start: Start, checkpoint: str) -> None:
    async with proxying(start, checkpoint) as (running, worker):
        body = {"rid": "mine", "endless": True}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as streamed:
            async for _ in streamed.aiter_bytes():
                break
        with anyio.fail_after(HANG_S):
            await worker.left.wait()
        assert worker.paths() == ["/v1/chat/completions"]


async def test_its_health_is_looked_at(start: Start, checkpoint: str) -> None:
    flags = ("--health-check-interval-secs", "0.05", "--health-failure-threshold", "1")
    async with proxying(start, checkpoint, *flags) as (running, worker):
        (one,) = running.router.pool
        await running.client.post("/weight_version", json={"weight_version": "7"})
        worker.well = False
        await until(lambda: one.state == "quarantined")
        worker.well = True
        await until(lambda: one.state == "ready")
        assert worker.got == [], "nor was it asked for its weights"


async def test_passthrough_workers_and_others_do_not_mix(start: Start, checkpoint: str) -> None:
    async with serving(answering(b"{}")) as other, proxying(start, checkpoint) as (running, _):
        for body in ({"url": other}, {"url": other, "worker_type": "prefill"}):
            refused = await running.client.post("/workers", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "MIXED_WORKERS")
        (first,) = running.router.pool
        again = await running.client.post("/add_worker", json={"url": first.url})
        assert again.status_code == 200
        assert first.worker_type == "passthrough", "it stays what it is"
        await running.client.post("/remove_worker", json={"url": first.url})
        assert (await running.client.post("/add_worker", json={"url": other})).status_code == 200
        refused = await running.client.post("/workers", json={"url": first.url, "worker_type": "passthrough"})
        assert refused.status_code == 409
        assert len(running.router.pool) == 1


async def test_answer_of_a_replaced_worker_is_no_evidence(
    start: Start,
) -> None:
    """The request left for an SGLang engine, rewritten and noted; the fleet is another one when it is answered."""
    flags = ("--plugin", "engine", "--engine-tokens-per-second", "40", "--plugin", "radix_cache")
    async with start(*flags) as running:
        (old,) = running.router.pool
        answers: list[Any] = []

        async def ask() -> None:
            body = {
                "text": "Once",
                "session_id": "s",
                "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
            }
            answers.append(await running.client.post("/generate", json=body))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: old.in_flight == 1)
            again = await running.client.post("/workers", json={"url": old.url, "worker_type": "passthrough"})
            assert again.status_code == 202
        found = await running.client.get("/trajectories/s")
        assert answers[0].headers["x-slime-exact"] == "false"
        assert found.status_code == 404


async def test_the_command_line_names_them(start: Start, checkpoint: str, tmp_path: Path) -> None:
    worker = VLLM()
    state = ("--plugin", "state", "--state-dir", str(tmp_path / "state"))
    async with serving(worker.app, grace_s=0.1) as url:
        async with start("--worker-type", "passthrough", "--worker-urls", url, *state) as running:
            assert (await running.client.post("/v1/completions", content=ASKED)).content == ANSWER
        async with start(*state) as running:
            assert (await running.client.post("/v1/completions", content=ASKED)).content == ANSWER
            assert [one.worker_type for one in running.router.pool] == ["passthrough"]


async def test_a_router_of_pairs_has_none(start: Start) -> None:
    async with start("--pd-disaggregation") as running:
        body = {"url": "http://127.0.0.1:9", "worker_type": "passthrough"}
        refused = await running.client.post("/workers", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "MIXED_WORKERS")
