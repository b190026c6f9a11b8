"""The calls of slime's trainer to a router and its engines, each as it makes it, in its order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx
import orjson
import pytest

from routers import Start
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
#: More than an engine samples while a test lasts.
ENDLESS = 20_000
#: slime waits so long between two aborts of an engine that is not idle.
_AGAIN_S = 3.0


@dataclass
class Sample:
    """A prompt, and what was sampled for it so far, in one or more calls."""

    prompt: list[int]
    status: str = "pending"
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response


class Trainer:
    """Rolls out through ``client``, the router; reaches ``engines`` directly."""

    def __init__(self, running: Running, engines: list[str], direct: httpx.AsyncClient) -> None:
        self.client, self.engines, self.direct = running.client, engines, direct

    async def generate(self, sample: Sample, max_new_tokens: int, *, streamed: bool) -> None:
        """Sample what is missing up to ``max_new_tokens``."""
        parameters = {"max_new_tokens": max_new_tokens - len(sample.response), "ignore_eos": True}
        payload = {"sampling_params": parameters, "return_logprob": True, "return_routed_experts": True}
        payload["input_ids"] = sample.tokens
        before = len(sample.response), len(sample.logprobs)
        async for meta in self._outputs(payload, streamed=streamed):
            del sample.response[before[0] :], sample.logprobs[before[1] :]
            sample.response += [token for _, token, _ in meta.get("output_token_logprobs", ())]
            sample.logprobs += [logprob for logprob, _, _ in meta.get("output_token_logprobs", ())]
            reason = meta["finish_reason"]
        sample.versions.append(meta["weight_version"])
        sample.status = {"length": "truncated", "abort": "aborted", "stop": "completed"}[reason["type"]]

    async def roll_out(self, samples: list[Sample], max_new_tokens: int, *, streamed: bool) -> None:
        """Let all ``samples`` be generated at once, to their ends."""
        async with anyio.create_task_group() as tasks:
            for sample in samples:
                tasks.start_soon(partial(self.generate, sample, max_new_tokens, streamed=streamed))

    async def _outputs(self, payload: dict[str, Any], *, streamed: bool) -> AsyncIterator[dict[str, Any]]:
        if not streamed:
            answer = await self.client.post("/generate", json=payload)
            answer.raise_for_status()
            yield answer.json()["meta_info"]
            return
        async with self.client.stream("POST", "/generate", json=payload | {"stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    yield orjson.loads(line.removeprefix("data:"))["meta_info"]

    async def abort(self) -> int:
        """End a rollout: abort all engines that the router names, each until it is idle. How often that took."""
        answer = (await self.client.get("/workers")).raise_for_status().json()
        urls = [worker["url"] for worker in answer["workers"]]
        assert sorted(urls) == sorted(self.engines)
        attempts: list[int] = []

        async def until_idle(url: str) -> None:
            attempts.append(0)
            place = len(attempts) - 1
            while True:
                attempts[place] += 1
                (await self.direct.post(f"{url}/abort_request", json={"abort_all": True})).raise_for_status()
                load = (await self.direct.get(f"{url}/v1/loads?include=core")).raise_for_status().json()
                if sum(each["num_total_reqs"] for each in load["loads"]) <= 0:
                    return
                await anyio.sleep(_AGAIN_S)

        async with anyio.create_task_group() as tasks:
            for url in urls:
                tasks.start_soon(until_idle, url)
        return max(attempts)

    async def update_weights(self, version: str) -> None:
        """Give all engines new weights, and tell the router nothing."""
        for url in self.engines:
            await self._control(url, "/pause_generation", {})
            await self._control(url, "/flush_cache", None)
            body = {"model_path": "/weights", "weight_version": version}
            await self._control(url, "/update_weights_from_disk", body)
            await self._control(url, "/continue_generation", {})

    async def _control(self, url: str, path: str, body: dict[str, Any] | None) -> None:
        method = "GET" if body is None else "POST"
        (await self.direct.request(method, url + path, json=body)).raise_for_status()

    async def journal(self) -> list[dict[str, Any]]:
        """All that the engines consumed and sampled."""
        each = [(await self.direct.get(f"{url}/journal")).json()["entries"] for url in self.engines]
        return [entry for entries in each for entry in entries]


@asynccontextmanager
async def training(start: Start, checkpoint: str) -> AsyncIterator[Trainer]:
    """Two engines that register themselves, and a router with default flags, radix_cache and r3."""
    model = load_model()
    settings = Settings(tokens_per_second=100, moe_layers=2, weight_version="1")
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(serving(make_app(settings, lambda: model), grace_s=0.1))
            for _ in range(2)
        ]
        flags = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--plugin", "r3")
        running = await stack.enter_async_context(start(*flags))
        direct = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=20))
        for url in engines:
            payload = {"url": url, "worker_type": "regular"}
            (await running.client.post("/workers", json=payload)).raise_for_status()
        with anyio.fail_after(10):
            while not all(worker.state == "ready" for worker in running.router.pool):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        yield Trainer(running, engines, direct)


def prompts(count: int) -> list[Sample]:
    encode = load_model().tokenizer.encode
    return [
        Sample(encode(f"<|im_start|>user\nStory {number}<|im_end|>\n<|im_start|>assistant\n"))
        for number in range(count)
    ]


@STREAMED
async def test_the_end_of_a_rollout_aborts_each_sample_once(
    start: Start, checkpoint: str, streamed: bool
) -> None:
    """Nothing is tried again, so the trainer does not wait; what was sampled comes back, and nothing else was."""
    samples = prompts(16)
    async with training(start, checkpoint) as trainer:
        async with anyio.create_task_group() as rollout:
            rollout.start_soon(partial(trainer.roll_out, samples, ENDLESS, streamed=streamed))
            await anyio.sleep(0.5)
            with anyio.fail_after(20):  # a retry would wait for 30 s
                await trainer.abort()
        entries = await trainer.journal()
    assert {sample.status for sample in samples} == {"aborted"}
    assert len(entries) == len(samples)
    sampled = {tuple(entry["input_ids"]): entry for entry in entries}
    for sample in samples:
        entry = sampled[tuple(sample.prompt)]
        assert (sample.response, sample.logprobs) == (entry["output_ids"], entry["output_logprobs"])


@STREAMED
async def test_a_partial_rollout_goes_on_under_new_weights(
    start: Start, checkpoint: str, streamed: bool
) -> None:
    samples = prompts(8)
    async with training(start, checkpoint) as trainer:
        async with anyio.create_task_group() as rollout:
            rollout.start_soon(partial(trainer.roll_out, samples, ENDLESS, streamed=streamed))
            await anyio.sleep(0.3)
            await trainer.abort()
        begun = {id(sample): len(sample.response) for sample in samples}
        assert any(begun.values())
        await trainer.update_weights("2")
        longest = max(begun.values()) + 10
        await trainer.roll_out(samples, longest, streamed=streamed)
        entries = {tuple(entry["input_ids"]): entry for entry in await trainer.journal()}
        version = (await trainer.client.get("/weight_version")).json()
    assert version["weight_version"] == "2"  # the answers have told
    for sample in samples:
        assert (sample.status, sample.versions) == ("truncated", ["1", "2"])
        cut = begun[id(sample)]
        later = entries[tuple(sample.prompt + sample.response[:cut])]
        assert (later["output_ids"], later["output_logprobs"]) == (
            sample.response[cut:],
            sample.logprobs[cut:],
        )
        assert set(later["output_versions"]) == {"2"}


async def test_an_engine_that_shuts_down_takes_itself_out(start: Start, checkpoint: str) -> None:
    async with training(start, checkpoint) as trainer:
        leaving = trainer.engines[0]
        workers = (await trainer.client.get("/workers")).json()["workers"]
        ids = [worker["id"] for worker in workers if worker["url"] == leaving]
        for each in ids:
            (await trainer.client.delete(f"/workers/{each}")).raise_for_status()
        (sample,) = prompts(1)
        await trainer.generate(sample, 5, streamed=False)
        with anyio.fail_after(5):
            while len((await trainer.client.get("/workers")).json()["workers"]) > 1:  # noqa: ASYNC110
                await anyio.sleep(0.02)
    assert sample.status == "truncated"
