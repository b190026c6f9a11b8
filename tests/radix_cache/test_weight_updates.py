"""Many conversations while the engines get new weights all the time: no client notices, every token is known."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from radix_cache.scripted import bits

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

QUESTION = "<|im_start|>user\nWhy? 😀<|im_end|>\n<|im_start|>assistant\n"
TURNS = 3


async def converse(client: httpx.AsyncClient, number: int, texts: dict[int, str]) -> None:
    """Three turns; every other conversation is streamed."""
    text = ""
    for turn in range(TURNS):
        text += QUESTION
        body = {
            "text": text,
            "rid": f"{number}-{turn}",
            "stream": number % 2 == 1,
            "sampling_params": {
                "max_new_tokens": 24,
                "min_new_tokens": 20,
                "temperature": 1.2,
            },
        }
        answer = await client.post("/generate", json=body, headers={"x-session-id": f"rollout-{number}"})
        assert answer.status_code == 200
        events = answer.text.split("\n\n") if body["stream"] else []
        output = orjson.loads(events[-3][6:]) if events else answer.json()
        assert output["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        assert output["meta_info"]["completion_tokens"] <= 24
        text += output["text"] + ("<|im_end|>\n" if turn < TURNS - 1 else "")
    texts[number] = text


async def train(client: httpx.AsyncClient, engines: list[str]) -> None:
    """New weights, again and again, by a trainer that does not know of the router."""
    version = 0
    while True:
        version += 1
        await anyio.sleep(0.08)  # a step of training
        for engine in engines:
            await client.post(f"{engine}/pause_generation", json={"mode": "abort"})
            update = {"model_path": "/m", "weight_version": str(version)}
            await client.post(f"{engine}/update_weights_from_disk", json=update)
            await client.post(f"{engine}/continue_generation", json={})


def truth(entries: list[list[dict[str, Any]]]) -> tuple[list[int], list[tuple[int, float, Any]]]:
    """Tokens of a conversation, and mask, logprob and version of each; ``entries`` of each turn in order."""
    tokens: list[int] = []
    known: list[tuple[int, float, Any]] = []
    for turn in entries:
        prompt = turn[0]["input_ids"]
        pairs = zip(tokens, prompt, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert same >= len(tokens) - 2, "only what a text does not show may be left out"
        known = known[:same] + [(0, 0.0, -1)] * (len(prompt) - same)
        tokens = list(prompt)
        for entry in turn:
            assert entry["input_ids"] == tokens, "each attempt goes on where the one before was aborted"
            tokens += entry["output_ids"]
            sampled = zip(entry["output_logprobs"], entry["output_versions"], strict=True)
            known += [(1, logprob, version) for logprob, version in sampled]
    return tokens, known


async def test_no_conversation_notices_new_weights(start: Start) -> None:
    engine = ["--plugin", "engine", "--engine-workers", "2", "--engine-tokens-per-second", "100"]
    flags = ["--engine-seed", "5", "--plugin", "radix_cache", "--resume-aborted"]
    texts: dict[int, str] = {}
    async with start(*engine, *flags) as running:
        client = running.client
        engines = (await client.get("/list_workers")).json()["urls"]
        async with anyio.create_task_group() as training:
            training.start_soon(train, client, engines)
            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(converse, client, number, texts)
            training.cancel_scope.cancel()
        journal: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for url in engines:
            for entry in (await client.get(f"{url}/journal")).json()["entries"]:
                journal[entry["rid"]].append(entry)
        versions: set[Any] = set()
        for number, text in texts.items():
            asked = {"text": text, "session_id": f"rollout-{number}"}
            answer = (await client.post("/retrieve_from_text", json=asked)).json()
            tokens, known = truth([journal[f"{number}-{turn}"] for turn in range(TURNS)])
            assert answer["exact"], answer["inexact_reason"]
            assert answer["tokens"] == tokens
            assert answer["loss_mask"] == [mask for mask, _, _ in known]
            assert bits(answer["rollout_logp"]) == bits([logprob for _, logprob, _ in known])
            assert answer["generation_versions"] == [version for _, _, version in known]
            versions |= {version for _, _, version in known}
        stats = (await client.get("/cache_stats")).json()
    assert len(texts) == 12
    assert len(versions) > 2
    assert stats["aborts"]["resumed"] >= len(texts)
    assert "passed_on" not in stats["aborts"]
    assert stats["unrecorded"] == {}
