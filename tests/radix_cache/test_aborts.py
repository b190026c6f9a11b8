"""Aborted generations with embedded engines: done again or continued, held against their journals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from radix_cache.scripted import bits

if TYPE_CHECKING:
    from routers import Running, Start

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


class Rollouts:
    """A router with one embedded engine, and what a client and a trainer do with them."""

    def __init__(self, running: Running, engine: str) -> None:
        self.running = running
        self.client = running.client
        self.engine = engine

    async def generate(self, rid: str, **parameters: Any) -> dict[str, Any]:
        body = {"text": PROMPT, "rid": rid, "sampling_params": {"ignore_eos": True, **parameters}}
        answer = await self.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def events(self, rid: str, **parameters: Any) -> list[dict[str, Any]]:
        body = {
            "text": PROMPT,
            "rid": rid,
            "stream": True,
            "sampling_params": {"ignore_eos": True, **parameters},
        }
        async with self.client.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200
            lines = [line[6:] async for line in reply.aiter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [orjson.loads(line) for line in lines[:-1]]

    async def direct(self, path: str, body: dict[str, Any]) -> None:
        """What a trainer says to the engine itself: the router does not hear of it."""
        answer = await self.client.post(self.engine + path, json=body)
        assert answer.status_code == 200, answer.text

    async def journal(self, rid: str) -> list[dict[str, Any]]:
        answer = await self.client.get(f"{self.engine}/journal", params={"rid": rid})
        entries: list[dict[str, Any]] = answer.json()["entries"]
        return entries

    async def sampled(self, rid: str, tokens: int, attempt: int = 1) -> None:
        """Return when the engine has sampled so many tokens in that attempt."""
        while True:
            entries = await self.journal(rid)
            if len(entries) >= attempt and len(entries[attempt - 1]["output_ids"]) >= tokens:
                return
            await anyio.sleep(0.005)

    async def update_weights(self, rid: str, version: str, tokens: int = 5, attempt: int = 1) -> None:
        """Abort everything in the middle of a generation, and load other weights."""
        await self.sampled(rid, tokens, attempt)
        await self.direct("/pause_generation", {"mode": "abort"})
        await self.direct("/update_weights_from_disk", {"model_path": "/m", "weight_version": version})
        await self.direct("/continue_generation", {})


@asynccontextmanager
async def rollouts(start: Start, *flags: str) -> AsyncIterator[Rollouts]:
    engine = [
        "--plugin",
        "engine",
        "--engine-workers",
        "1",
        "--engine-tokens-per-second",
        "100",
        "--engine-seed",
        "3",
    ]
    async with start(*engine, "--plugin", "radix_cache", *flags) as running:
        urls = (await running.client.get("/list_workers")).json()["urls"]
        yield Rollouts(running, urls[0])


def ids_of(entries: list[dict[str, Any]]) -> list[int]:
    return [one for entry in entries for one in entry["output_ids"]]


def assert_joined(answer: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """``answer`` has what the journal has in these entries, in order, each of which went on from the one before."""
    meta = answer["meta_info"]
    prompt = entries[0]["input_ids"]
    sampled: list[int] = []
    for entry in entries:
        assert entry["input_ids"] == prompt + sampled
        sampled += entry["output_ids"]
    assert answer["output_ids"] == sampled
    assert [one for _, one, _ in meta["output_token_logprobs"]] == sampled
    logprobs = [one for entry in entries for one in entry["output_logprobs"]]
    assert bits([one for one, _, _ in meta["output_token_logprobs"]]) == bits(logprobs)
    versions = [one for entry in entries for one in entry["output_versions"]]
    spans = meta.get("weight_versions", [{"version": versions[0], "start": 0, "end": len(versions)}])
    assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == versions
    assert meta["weight_version"] == versions[-1]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), len(sampled))
    assert meta["output_token_logprobs_length"] == len(sampled)


async def test_a_resumed_generation_is_one_response(start: Start) -> None:
    async with rollouts(start, "--resume-aborted") as rollout, anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.update_weights, "r", "7")
        answer = await rollout.generate("r", max_new_tokens=30)
        entries = await rollout.journal("r")
        kept = await rollout.client.post("/retrieve_from_text", json={"text": PROMPT + answer["text"]})
    assert len(entries) == 2
    assert_joined(answer, entries)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["default", "7"]
    assert answer["meta_info"]["e2e_latency"] >= 0.28
    assert kept.json()["exact"]
    assert kept.json()["candidates"] == 1
    assert kept.json()["tokens"] == entries[0]["input_ids"] + answer["output_ids"]
    assert kept.json()["generation_versions"][-30:] == [
        version for entry in entries for version in entry["output_versions"]
    ]
