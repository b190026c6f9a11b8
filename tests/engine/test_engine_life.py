"""Starting, crashing, ending, and clients that leave."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from deadlines import HANG_S
from engine.served import CHAT, Serve
from slime_engine.app import make_app
from slime_engine.backends import load_backend
from slime_engine.model import FloatArray, NgramModel
from slime_engine.settings import Settings
from slime_http.serving import serving

pytestmark = pytest.mark.anyio

ENDLESS = {"max_new_tokens": 5000, "ignore_eos": True}


class VanishingModel(NgramModel):
    """A model whose weights vanish when a token is sampled under the version ``broken``."""

    def __init__(self, model: NgramModel) -> None:
        self.__dict__.update(model.__dict__)

    def logits(self, before: int, last: int, version: str) -> FloatArray:
        if version == "broken":
            raise RuntimeError("the weights are gone")
        return super().logits(before, last, version)


async def test_an_engine_that_loads_is_unavailable_until_it_has(model: NgramModel) -> None:
    may_load, ready = threading.Event(), anyio.Event()

    def load() -> NgramModel:
        may_load.wait(10)
        return model

    app = make_app(Settings(load_in_background=True), load, ready.set)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for path in ("/health", "/v1/models", "/journal"):
            assert (await client.get(path)).status_code == 503
        refused = await client.post("/generate", json={"text": "a"})
        assert refused.status_code == 503
        assert "starting" in refused.json()["error"]["message"]
        may_load.set()
        with anyio.fail_after(HANG_S):
            await ready.wait()
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/generate", json={"text": "a"})).status_code == 200


@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
async def test_the_tokenizer_is_told_to_whoever_asks_first(model: NgramModel, path: str) -> None:
    may_load = threading.Event()

    def load() -> NgramModel:
        may_load.wait(10)
        return model

    app = make_app(Settings(load_in_background=True), load)
    answers: list[httpx.Response] = []
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:

        async def ask() -> None:
            answers.append(await client.get(path))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await client.get("/health")  # which is answered behind it
            assert not answers
            may_load.set()
        assert answers[0].status_code == 200
        assert (Path(answers[0].json()["tokenizer_path"]) / "tokenizer.json").exists()


async def test_a_load_that_fails_is_told_to_everybody() -> None:
    def load() -> NgramModel:
        raise OSError("no such corpus")

    app = make_app(Settings(load_in_background=True), load)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        with anyio.fail_after(HANG_S):
            while "crashed" not in (answer := await client.get("/health")).text:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert (await client.get("/model_info")).status_code == 503
    assert answer.status_code == 503
    assert "no such corpus" in answer.text


async def test_a_crash_fails_every_waiter_at_once(serve: Serve, model: NgramModel) -> None:
    async with (
        serve(lambda: VanishingModel(model), tokens_per_second=100, max_running_requests=2) as engine,
        anyio.create_task_group() as tasks,
    ):
        answers: list[httpx.Response] = []
        events: list[str] = []

        async def generate() -> None:
            body = {"text": CHAT, "sampling_params": ENDLESS}
            answers.append(await engine.client.post("/generate", json=body))

        async def stream() -> None:
            body = {"text": CHAT, "sampling_params": ENDLESS, "stream": True}
            async with engine.client.stream("POST", "/generate", json=body) as answer:
                events.extend([line async for line in answer.aiter_lines() if line])

        tasks.start_soon(stream)
        await engine.until(lambda s: len(s.running) == 1)
        for _ in range(3):
            tasks.start_soon(generate)
        await engine.until(lambda s: len(s.running) == 2 and len(s.waiting) == 2)
        with anyio.fail_after(HANG_S):
            await engine.post("/update_weight_version", new_version="broken", abort_all_requests=False)
            while len(answers) < 3 or not events or events[-1] != "data: [DONE]":  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert [answer.status_code for answer in answers] == [500] * 3
        assert all("the weights are gone" in answer.json()["error"]["message"] for answer in answers)
        assert "error" in events[-2]
        assert "the weights are gone" in events[-2]
        assert engine.host.engine_or_none is not None
        for entry in engine.host.engine_or_none.journal.entries():
            assert entry.finish_reason is not None
            assert entry.finish_reason["status_code"] == 500
            assert entry.text == model.tokenizer.decode(entry.output_ids, skip_special_tokens=True)
        for path in ("/health", "/v1/loads"):
            answer = await engine.client.get(path)
            assert answer.status_code == 503
            assert "crashed" in answer.json().get("message", "") + str(answer.json().get("error"))
        refused = await engine.client.post("/generate", json={"text": "a"})
        assert refused.status_code == 503


async def test_an_ending_engine_is_unavailable_and_lets_nobody_wait(model: NgramModel) -> None:
    app = make_app(Settings(tokens_per_second=50), lambda: model)
    transport = httpx.ASGITransport(app)
    answers: list[httpx.Response] = []
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://engine") as client,
        anyio.create_task_group() as tasks,
    ):
        async with app.router.lifespan_context(app):

            async def generate() -> None:
                body = {"text": CHAT, "sampling_params": ENDLESS}
                answers.append(await client.post("/generate", json=body))

            tasks.start_soon(generate)
            while not app.state.host.engine.scheduler.running:  # noqa: ASYNC110
                await anyio.sleep(0.002)
        refused = await client.get("/health")
    assert [answer.status_code for answer in answers] == [503]
    for answer in (*answers, refused):
        assert "ending" in answer.json()["error"]["message"]


@asynccontextmanager
async def raw_request(client: httpx.AsyncClient, body: bytes) -> AsyncIterator[anyio.abc.SocketStream]:
    url = client.base_url
    assert url.port is not None
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    async with await anyio.connect_tcp(url.host, url.port) as stream:
        await stream.send(head.encode() + body)
        yield stream


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("text", [b'"a"', b'["a", "b", "c"]'])
async def test_a_client_that_leaves_ends_its_generation(serve: Serve, stream: bytes, text: bytes) -> None:
    body = b'{"text":%s,"stream":%s,"sampling_params":{"max_new_tokens":5000,"ignore_eos":true}}'
    async with serve(tokens_per_second=100) as engine:
        count = 3 if text.startswith(b"[") else 1
        async with raw_request(engine.client, body % (text, stream)):
            await engine.until(
                lambda s: (
                    len(s.running) == count and all(one.completion_tokens > 2 for one in s.running.values())
                )
            )
        left_at = anyio.current_time()
        await engine.until(lambda s: not s.running and not s.waiting)
        assert anyio.current_time() - left_at < 1
        assert engine.host.engine.manager.rid_to_state == {}
        entries = await engine.journal()
    assert len(entries) == count
    assert all(entry["aborted"] and len(entry["output_ids"]) > 2 for entry in entries)


async def test_a_client_that_leaves_the_queue_is_forgotten(serve: Serve) -> None:
    async with serve() as engine:
        await engine.post("/pause_generation")
        async with raw_request(engine.client, b'{"text":"a","rid":"gone"}'):
            await engine.until(lambda s: "gone" in s.waiting)
        await engine.until(lambda s: not s.waiting)
        await engine.post("/continue_generation")
        answer = await engine.generate(text="a", rid="gone")
        assert answer["meta_info"]["finish_reason"]["type"] != "abort", "the rid is free, and its own again"


async def test_the_tokenizer_directory_lives_as_long_as_the_engine(serve: Serve) -> None:
    async with serve() as one, serve() as two:
        paths = {(await engine.get("/model_info"))["tokenizer_path"] for engine in (one, two)}
        assert len(paths) == 2
        for path in paths:
            assert await anyio.Path(path, "tokenizer.json").exists()
    for path in paths:
        assert not await anyio.Path(path).exists()


async def test_no_task_is_left_behind(serve: Serve) -> None:
    before = len(anyio.get_running_tasks())
    async with serve() as engine:
        await engine.generate(text=["a", "b"])
        assert len(anyio.get_running_tasks()) > before
    assert len(anyio.get_running_tasks()) == before


async def test_the_latency_and_the_pace_are_kept(serve: Serve) -> None:
    async with serve(latency_ms=80, tokens_per_second=100) as engine:
        times = []
        started = anyio.current_time()
        body = {"text": "The", "sampling_params": {"max_new_tokens": 11, "ignore_eos": True}}
        async for _ in engine.events("/generate", **body):
            times.append(anyio.current_time() - started)
    assert times[0] >= 0.079
    assert times[-1] >= 0.079 + 0.095  # a slow machine only adds to it


def test_the_log_names_a_model_before_it_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = Settings(backend="transformers", model=str(tmp_path))
    with (
        caplog.at_level("INFO"),
        pytest.raises((ValueError, OSError, ImportError)),
    ):  # no such model, or no torch
        load_backend(settings)
    assert caplog.messages[0] == f"loading the model {tmp_path}"
