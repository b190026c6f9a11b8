"""Conversations of every kind with embedded engines, held against their journals: equal, or said not to be."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from radix_cache.scripted import bits

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

SYSTEM = "<|im_start|>system\nYou help. ☔<|im_end|>\n"
QUESTIONS = ("Why?", "Write a program.", "日本語で答えて 😀", "the harbour wakes")
#: How a client makes its next prompt out of what it got.
MANNERS = ("template", "strip", "cut", "append", "leave_early")


@dataclass
class Rollout:
    """One session: its text, and for each token what the engines' journals say it is."""

    name: str
    random: random.Random
    manner: str
    text: str = ""
    rids: list[str] = field(default_factory=list)

    def ask(self) -> None:
        question = self.random.choice(QUESTIONS)
        self.text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"

    def take(self, answer: str) -> None:
        """Read ``answer``, and go on in this rollout's manner."""
        if self.manner == "strip":
            answer = answer.strip()
        elif self.manner == "cut":
            answer = answer[: self.random.randrange(len(answer) + 1)]
        self.text += answer
        if self.manner in ("cut", "append"):
            self.text += "\n<tool_response>42</tool_response>\n"
        else:
            self.text += "<|im_end|>\n"
            self.ask()


async def roll(client: httpx.AsyncClient, rollout: Rollout, turns: int) -> None:
    rollout.text = SYSTEM
    rollout.ask()
    for turn in range(turns):
        rid = f"{rollout.name}-{turn}"
        rollout.rids.append(rid)
        body = {
            "text": rollout.text,
            "rid": rid,
            "stream": rollout.random.random() < 0.5,
            "sampling_params": {
                "max_new_tokens": rollout.random.randrange(1, 40),
                "temperature": 1.2,
                "stop": rollout.random.choice([None, ["the", "e "]]),
                "no_stop_trim": rollout.random.random() < 0.3,
                "skip_special_tokens": rollout.random.random() < 0.7,
                "ignore_eos": rollout.random.random() < 0.3,
            },
        }
        if body["stream"]:
            answer = await read_stream(client, rollout, body, turn)
        else:
            reply = await client.post("/generate", json=body, headers={"x-session-id": rollout.name})
            assert reply.status_code == 200, reply.text
            answer = reply.json()["text"]
        if turn < turns - 1:
            rollout.take(answer)
        else:
            rollout.text += answer


async def read_stream(client: httpx.AsyncClient, rollout: Rollout, body: dict[str, Any], turn: int) -> str:
    headers = {"x-session-id": rollout.name}
    text = ""
    async with client.stream("POST", "/generate", json=body, headers=headers) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = orjson.loads(line[6:])
                incremental = len(event["output_ids"]) < event["meta_info"]["completion_tokens"]
                text = text + event["text"] if incremental else event["text"]
                if rollout.manner == "leave_early" and len(text) > 8:
                    break
    return text


async def journals(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    urls = (await client.get("/list_workers")).json()["urls"]
    entries = [entry for url in urls for entry in (await client.get(f"{url}/journal")).json()["entries"]]
    return {entry["rid"]: entry for entry in entries}


def truth(
    rollout: Rollout, journal: dict[str, dict[str, Any]]
) -> tuple[list[int], list[tuple[int, float, Any]]]:
    """Tokens of the last turn, and ``(mask, logprob, version)`` of each: sampled in an earlier turn, or not."""
    tokens: list[int] = []
    known: list[tuple[int, float, Any]] = []
    for rid in rollout.rids:
        entry = journal[rid]
        same = 0
        while same < min(len(tokens), len(entry["input_ids"])) and tokens[same] == entry["input_ids"][same]:
            same += 1
        known = known[:same] + [(0, 0.0, -1)] * (len(entry["input_ids"]) - same)
        tokens = entry["input_ids"] + entry["output_ids"]
        sampled = zip(entry["output_logprobs"], entry["output_versions"], strict=True)
        known += [(1, logprob, version) for logprob, version in sampled]
    return tokens, known


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_every_conversation_is_exact_or_says_why_not(start: Start, incremental: bool) -> None:
    flags = ["--engine-incremental-streaming-output"] if incremental else []
    async with start(
        "--plugin", "engine", "--engine-workers", "2", "--engine-seed", "1", *flags, "--plugin", "radix_cache"
    ) as running:
        client = running.client
        rollouts = [
            Rollout(f"{manner}-{number}", random.Random(f"{manner}{number}"), manner)
            for manner in MANNERS
            for number in range(6)
        ]
        async with anyio.create_task_group() as tasks:
            for rollout in rollouts:
                tasks.start_soon(roll, client, rollout, 4)
        entries = await journals(client)
        outcomes: Counter[str] = Counter()
        for rollout in rollouts:
            asked = {"text": rollout.text, "session_id": rollout.name}
            answer = (await client.post("/retrieve_from_text", json=asked)).json()
            outcomes[answer["inexact_reason"] or "exact"] += 1
            if not answer["exact"]:
                assert answer["inexact_reason"] == "cut_inside_token"
                assert rollout.manner == "leave_early"
                continue
            tokens, known = truth(rollout, entries)
            count = len(answer["tokens"])
            if rollout.manner == "leave_early":
                tokens, known = tokens[:count], known[:count]  # the engine went on after the client had left
            assert answer["tokens"] == tokens, rollout
            assert answer["loss_mask"] == [mask for mask, _, _ in known]
            assert bits(answer["rollout_logp"]) == bits([logprob for _, logprob, _ in known])
            assert answer["generation_versions"] == [version for _, _, version in known]
        stats = (await client.get("/cache_stats")).json()
    assert outcomes["exact"] >= 25
    assert stats["unrecorded"] == {}
    assert stats["untouched"] == {}
    assert stats["per_turn"]["4"]["requests"] > 0
