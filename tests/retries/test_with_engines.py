"""Engines killed while they generate, behind radix cache and control plane, held against their journals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest

from core.servers import Wire, answer, scripted
from engine.served import served
from plugged import until
from retries.moods import Moody, refused
from routers import BARE, Start
from slime_engine.journal_file import fold
from slime_engine.model import load_model
from slime_engine.settings import Settings as EngineSettings
from slime_engine.tokenizer import corpus_documents, train_tokenizer
from slime_testing import Running

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nTell me a story, number {}.<|im_end|>\n<|im_start|>assistant\n"
SAMPLING = {"max_new_tokens": 60, "ignore_eos": True}


class KillableEngine:
    """An engine in a process of its own, which can be killed; its journal outlives it."""

    def __init__(self, journal: Path, tokens_per_second: int) -> None:
        self._journal = journal
        command = [sys.executable, "-m", "router_core", "engine", "--port", "0"]
        command += ["--tokens-per-second", str(tokens_per_second)]
        self.process = subprocess.Popen(
            [*command, "--journal-file", str(journal)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    async def url(self) -> str:
        """Return its URL, once it is ready."""
        assert self.process.stdout is not None
        line = await anyio.to_thread.run_sync(self.process.stdout.readline)
        return line.decode().split()[-1]

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return its journal entries so far, by rid."""
        found = fold(self._journal.read_bytes().splitlines()) if self._journal.exists() else {}
        return {entry["rid"]: entry for entry in found.values()}

    def end(self) -> None:
        """``kill -9``."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint")
    train_tokenizer(corpus_documents()).save(path)
    return str(path)


PLUGINS = (*BARE, "--plugin", "control", "--plugin", "retries")


@asynccontextmanager
async def two_engines(
    start: Start, checkpoint: str, path: Path
) -> AsyncIterator[tuple[Running, list[KillableEngine]]]:
    engines = [
        KillableEngine(path / "killed", 10),
        KillableEngine(path / "survivor", 40),
    ]  # the first has its answers for 6 s
    try:
        async with start(*PLUGINS, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint) as running:
            for engine in engines:
                await running.router.add_worker(await engine.url())
            assert running.router.pool.healthy == 2
            yield running, engines
    finally:
        for engine in engines:
            engine.end()


async def test_conversations_stay_exact_when_an_engine_is_killed(
    start: Start, checkpoint: str, tmp_path: Path
) -> None:
    answers: dict[str, dict[str, Any]] = {}
    async with two_engines(start, checkpoint, tmp_path) as (running, engines):

        async def rollout(name: str) -> None:
            text = PROMPT.format(name)
            for turn in range(2):
                body = {"text": text, "rid": f"{name}.{turn}", "sampling_params": SAMPLING}
                reply = await running.client.post("/generate", json=body, headers={"x-session-id": name})
                assert reply.status_code == 200, reply.text
                answers[f"{name}.{turn}"] = reply.json()
                text += reply.json()["text"]
            told = await running.client.post("/retrieve_from_text", json={"text": text, "session_id": name})
            retrieved[name] = told.json()

        retrieved: dict[str, dict[str, Any]] = {}
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(rollout, f"s{number}")
            await until(lambda: len(engines[0].entries()) >= 3)
            await anyio.sleep(0.3)  # some of its tokens are sampled
            engines[0].end()
            killed = engines[0].entries()
        survivor = engines[1].entries()
        cut_off = {rid for rid, entry in killed.items() if entry["finish_reason"] is None}
        assert cut_off
        assert cut_off <= survivor.keys()
        journal = killed | survivor
        for rid, said in answers.items():
            entry = journal[rid]
            assert said["output_ids"] == entry["output_ids"]
            assert [pair[0] for pair in said["meta_info"]["output_token_logprobs"]] == entry[
                "output_logprobs"
            ]
        for name, told in retrieved.items():
            assert told["exact"], told["inexact_reason"]
            last = journal[f"{name}.1"]
            assert told["tokens"] == last["input_ids"] + last["output_ids"]
            assert told["loss_mask"][len(last["input_ids"]) :] == [1] * len(last["output_ids"])
        assert not any(worker.in_flight for worker in running.router.pool)


async def test_stream_is_not_generated_again_once_it_has_begun(
    start: Start, checkpoint: str, tmp_path: Path
) -> None:
    async with two_engines(start, checkpoint, tmp_path) as (running, engines):
        body = {"text": PROMPT, "rid": "streamed", "stream": True, "sampling_params": SAMPLING}
        events: list[dict[str, Any]] = []
        killed: list[KillableEngine] = []

        async def read() -> None:
            async with running.client.stream("POST", "/generate", json=body) as reply:
                async for line in reply.aiter_lines():
                    events.extend([orjson.loads(line[6:])] if line else [])
                    if not killed and len(events) == 5:
                        killed.extend(engine for engine in engines if "streamed" in engine.entries())
                        killed[0].end()

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        await anyio.sleep(0.2)
        assert [engine for engine in engines if "streamed" in engine.entries()] == killed
        told = events[-1]["output_ids"]
        assert told == killed[0].entries()["streamed"]["output_ids"][: len(told)]


async def test_a_storm_behind_an_abort_is_not_tried_again_by_two_plugins_at_once(
    start: Start, checkpoint: str
) -> None:
    meta = {"id": "r", "finish_reason": {"type": "abort"}, "prompt_tokens": 1, "completion_tokens": 0}
    aborted = orjson.dumps({"text": "", "output_ids": [], "meta_info": meta})
    one = Moody(answer(aborted, b"Content-Type: application/json"), rest=refused(503))
    cache = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint)
    waits = ("--abort-retries", "3", "--abort-retry-wait-s", "0.02", "--retry-initial-backoff-ms", "1")
    async with scripted(one.serve) as server, start(*PLUGINS, *cache, *waits) as running:
        await running.router.add_worker(server.url)
        reply = await running.client.post("/generate", json={"text": PROMPT})
        assert (reply.status_code, reply.content) == (200, aborted)  # the last answer stands
        generations = [request for request in one.arrived if request.line.startswith(b"POST /generate ")]
        assert len(generations) == 1 + 5 + 2


async def test_an_attempt_whose_connection_broke_is_ended_on_its_engine(start: Start) -> None:
    """Something between router and engine cuts the connection; the engine does not notice, and is asked again."""
    model = load_model()
    async with (
        served(lambda: model, EngineSettings(tokens_per_second=60)) as engine,
        anyio.create_task_group() as tasks,
        start(*PLUGINS) as running,
    ):
        cut = False

        async def serve(wire: Wire) -> None:
            nonlocal cut
            while request := await wire.request():
                method, path, _ = request.line.decode().split()
                forward = partial(engine.client.request, method, path, content=request.body)
                if path == "/generate" and not cut:
                    cut = True
                    tasks.start_soon(forward)
                    await anyio.sleep(0.3)
                    return
                await wire.send(answer((await forward()).content))

        async with scripted(serve) as between:
            await running.router.add_worker(between.url)
            body = {"text": PROMPT, "rid": "mine", "sampling_params": SAMPLING}
            reply = await running.client.post("/generate", json=body)
        abandoned, whole = await engine.journal("mine")
        assert abandoned["aborted"]
        assert len(abandoned["output_ids"]) < 60
        assert reply.json()["output_ids"] == whole["output_ids"]
        assert whole["finish_reason"]["type"] == "length"


async def test_an_attempt_that_meets_paused_engines_waits_for_them_to_continue(
    start: Start,
) -> None:
    one = Moody(refused(503), rest=answer(b"{}"))
    engine = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache")
    async with (
        scripted(one.serve) as server,
        start(*PLUGINS, *engine, "--retry-initial-backoff-ms", "300") as running,
    ):
        await running.router.add_worker(server.url)
        (first,) = [worker for worker in running.router.pool if worker.url == server.url]
        running.router.pool.bind("s", first)
        replies: list[httpx.Response] = []

        async def ask() -> None:
            body = {"text": PROMPT, "sampling_params": {**SAMPLING, "max_new_tokens": 4}}
            replies.append(await running.client.post("/generate", json=body, headers={"x-session-id": "s"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(one.arrived) == 1 and not first.in_flight)
            assert (await running.client.post("/pause_generation", json={"mode": "abort"})).status_code == 200
            await anyio.sleep(0.7)
            assert replies == []
            assert (await running.client.post("/continue_generation", json={})).status_code == 200
        assert replies[0].status_code == 200
        assert len(replies[0].json()["output_ids"]) == 4
