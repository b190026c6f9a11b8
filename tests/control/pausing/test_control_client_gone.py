"""A client hangs up: its engine stops within a second, because it is told to, and what it had sampled is kept.

The engines here never notice a closed connection, as SGLang does not for four seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import orjson
import pytest

from control.steered import Steered, hung, steering
from plugged import until
from ports import free_port
from router_core.request import Request
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from routers import Start
from slime_control.pausing.abort_sender import AbortSender
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
#: A request that takes ten seconds.
SAMPLING = {"max_new_tokens": 1000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1000, "ignore_eos": True}


@dataclass
class Deaf:
    """An engine that does not hear its clients leave; ``aborted`` are the bodies of ``/abort_request``."""

    app: ASGIApp
    aborted: list[Any] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def hear() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if scope["path"] == "/abort_request" and not message.get("more_body", False):
                self.aborted.append(orjson.loads(body))
            if message["type"] == "http.disconnect":
                await anyio.sleep_forever()
            return message

        await self.app(scope, hear if scope["type"] == "http" else receive, send)


@asynccontextmanager
async def deaf_engine(start: Start, *flags: str) -> AsyncIterator[tuple[Deaf, Running]]:
    engine = Deaf(make_app(Settings(tokens_per_second=100, seed=1)))
    async with serving(engine, grace_s=1) as url, start(*flags, "--worker-urls", url) as running:
        engine.url = url
        await until(lambda: running.router.pool.healthy == 1)
        yield engine, running


async def running_on(engine: Deaf) -> int:
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        [load] = (await client.get("/v1/loads")).json()["loads"]
        return int(load["num_running_reqs"])


async def eventually(condition: Callable[[], Any], within_s: float) -> None:
    with anyio.fail_after(within_s):
        while not await condition():  # noqa: ASYNC110  # what an engine does is seen, not told
            await anyio.sleep(0.01)


async def leave(running: Running, engine: Deaf, path: str, body: Any, sequences: int = 1) -> None:
    """Ask, and hang up when the engine has begun."""

    async def ask() -> None:
        async with running.client.stream("POST", path, json=body, headers={"x-session-id": "s"}) as answer:
            async for _ in answer.aiter_raw():
                pass

    async def begun() -> bool:
        return await running_on(engine) == sequences

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await eventually(begun, 5)
        await anyio.sleep(0.2)
        tasks.cancel_scope.cancel()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    load_model().tokenizer.save(directory)
    return str(directory)


SHAPES = {
    "single": ("/generate", {"text": PROMPT, "sampling_params": SAMPLING}, 1),
    "named": ("/generate", {"text": PROMPT, "sampling_params": SAMPLING, "rid": "mine"}, 1),
    "batch": ("/generate", {"text": [PROMPT, PROMPT + "a"], "sampling_params": SAMPLING}, 2),
    "named batch": ("/generate", {"text": [PROMPT] * 2, "sampling_params": SAMPLING, "rid": ["a", "b"]}, 2),
    "stream": ("/generate", {"text": PROMPT, "sampling_params": SAMPLING, "stream": True}, 1),
    "stream of a batch": (
        "/generate",
        {"text": [PROMPT] * 2, "sampling_params": SAMPLING, "stream": True},
        2,
    ),
    "chat": ("/v1/chat/completions", CHAT, 1),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}, 1),
}
BESIDE = {
    "bare": (),
    "radix_cache": ("--plugin", "radix_cache"),
    "openai": ("--plugin", "radix_cache", "--plugin", "openai"),
}


@pytest.mark.parametrize("plugins", BESIDE)
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_engine_stops_within_a_second(
    start: Start, checkpoint: str, shape: str, plugins: str
) -> None:
    path, body, sequences = SHAPES[shape]
    flags = (*BESIDE[plugins], "--hf-checkpoint", checkpoint) if plugins != "bare" else ()
    async with deaf_engine(start, *flags) as (engine, running):
        await leave(running, engine, path, body, sequences)

        async def stopped() -> bool:
            return await running_on(engine) == 0

        await eventually(stopped, 1)
        assert engine.aborted
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        answer = await running.client.post("/generate", json={"text": PROMPT})
        assert answer.status_code == 200


@pytest.mark.parametrize("shape", ["single", "named", "batch", "stream", "stream of a batch"])
async def test_what_it_had_sampled_is_recorded(start: Start, checkpoint: str, shape: str) -> None:
    path, body, sequences = SHAPES[shape]
    async with deaf_engine(start, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint) as (
        engine,
        running,
    ):
        await leave(running, engine, path, body, sequences)
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        samples = (await running.client.get("/trajectories/s")).json()["trajectories"]
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            journal = (await client.get("/journal")).json()["entries"]
    assert len(samples) == sequences
    sampled = [entry["output_ids"] for entry in journal]
    for sample in samples:
        ids = [token for token, mask in zip(sample["tokens"], sample["loss_mask"], strict=True) if mask]
        assert len(ids) >= 5
        if "stream" in shape:
            assert any(whole[: len(ids)] == ids for whole in sampled)  # as far as the router was told
        else:
            assert ids in sampled


async def test_samples_that_the_engine_names_anew_end_with_the_connection(start: Start) -> None:
    """With ``n`` SGLang makes new rids, which nobody knows: it has to notice by itself."""
    async with deaf_engine(start) as (engine, running):
        body = {"text": PROMPT, "sampling_params": {**SAMPLING, "n": 2}}
        await leave(running, engine, "/generate", body, 2)
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        assert running.router.proxy.busy_connections == 0
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            await client.post("/abort_request", json={"abort_all": True})


async def test_disconnect_does_not_abort_rids_with_the_same_prefix(start: Start) -> None:
    """An abort of ``job-1`` would end ``job-10`` too: SGLang looks at beginnings."""
    async with deaf_engine(start) as (engine, running):
        ended: list[str] = []

        async def stay(rid: str) -> None:
            body = {"text": PROMPT, "rid": rid, "sampling_params": {**SAMPLING, "max_new_tokens": 100}}
            answer = await running.client.post("/generate", json=body)
            ended.append(answer.json()["meta_info"]["finish_reason"]["type"])

        async with anyio.create_task_group() as others:
            for rid in ("job-10", "job-1_", "other"):
                others.start_soon(stay, rid)
            body = {"text": PROMPT, "rid": "job-1", "sampling_params": SAMPLING}
            await leave(running, engine, "/generate", body, 4)
        assert ended == ["length"] * 3
        assert not engine.aborted  # it is left to the connection
        await leave(running, engine, "/generate", {**body, "rid": "job-2"}, 2)
        await until(lambda: engine.aborted == [{"rid": "job-2"}])
        async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            await client.post("/abort_request", json={"abort_all": True})


async def test_an_answer_that_a_plugin_gives_up_is_not_generated_to_its_end(start: Start) -> None:
    async with deaf_engine(start) as (engine, running):
        payload = {"text": PROMPT, "sampling_params": SAMPLING, "stream": True}
        async with running.router.generate(payload) as reply:
            await reply.next_piece()

        async def stopped() -> bool:
            return await running_on(engine) == 0

        await eventually(stopped, 1)
        assert len(engine.aborted) == 1


async def test_worker_that_answers_no_abort_delays_no_abort_of_others() -> None:
    hanging, good = hung(), Steered()
    async with steering(hanging, good) as running:
        there, here = running.router.pool
        for number in range(300):
            given_up = Request("POST", b"/generate", [], b'{"rid": "there-%d"}' % number)
            running.control.attempt_failed(there, given_up, None)
        running.control.attempt_failed(here, Request("POST", b"/generate", [], b'{"rid": "here"}'), None)
        await until(lambda: good.bodies("/abort_request") == [{"rid": "here"}])


async def test_nothing_is_kept_of_a_worker_without_aborts_in_flight() -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        (there,) = running.router.pool
        sender = AbortSender(running.router)
        tasks.start_soon(sender.run)
        for number in range(3):
            sender.end(there, f"gone-{number}")
        await sender.settled(there)
        await until(lambda: not sender._under_way)
        assert len(worker.bodies("/abort_request")) == 3
        assert not sender._limits
        tasks.cancel_scope.cancel()
    sender.close()


async def test_log_names_a_worker_that_answers_no_aborts_once(caplog: pytest.LogCaptureFixture) -> None:
    async with steering(Steered()) as running, anyio.create_task_group() as tasks:
        (there,) = running.router.pool
        sender = AbortSender(running.router)
        tasks.start_soon(sender.run)
        address = there.url

        async def abort(url: str) -> int:
            """Send an abort to ``url``; count the lines of the log so far."""
            there.url = url
            sender.end(there, "gone")
            await until(lambda: not sender._under_way)
            return caplog.text.count("did not answer an abort")

        nowhere = f"http://127.0.0.1:{free_port()}"
        with caplog.at_level("INFO", "slime_control"):
            assert [await abort(nowhere) for _ in range(3)] == [1, 1, 1]
            assert [await abort(address), await abort(nowhere)] == [1, 2]
        tasks.cancel_scope.cancel()
    sender.close()
