"""Rollouts against engines whose journals are the truth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

SYSTEM = "<|im_start|>system\nYou help. ☔<|im_end|>\n"
QUESTIONS = ("Why?", "Write a program.", "日本語で答えて 😀", "the harbour wakes")


@dataclass
class RolledSession:
    """One session: its text, and for each token what the engines' journals say it is.

    ``read``: by rid, how many sampled tokens the client had read when it left; all for others.
    """

    name: str
    random: random.Random
    manner: str
    text: str = ""
    rids: list[str] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)

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


async def roll(client: httpx.AsyncClient, rollout: RolledSession, turns: int) -> None:
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


async def read_stream(
    client: httpx.AsyncClient, rollout: RolledSession, body: dict[str, Any], turn: int
) -> str:
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
                    rollout.read[body["rid"]] = event["meta_info"]["completion_tokens"]
                    break
    return text


async def journals(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    urls = (await client.get("/list_workers")).json()["urls"]
    entries = [entry for url in urls for entry in (await client.get(f"{url}/journal")).json()["entries"]]
    return {entry["rid"]: entry for entry in entries}


def truth(
    rollout: RolledSession, journal: dict[str, dict[str, Any]]
) -> tuple[list[int], list[tuple[int, float, Any]]]:
    """Tokens of the last turn, and ``(mask, logprob, version)`` of each: sampled in an earlier turn, or not."""
    tokens, samples = _traced(rollout, journal)
    known: list[tuple[int, float, Any]] = []
    for sample in samples:
        if sample is None:
            known.append((0, 0.0, -1))
        else:
            entry, number = journal[sample[0]], sample[1]
            known.append((1, entry["output_logprobs"][number], entry["output_versions"][number]))
    return tokens, known


def unread(rollout: RolledSession, journal: dict[str, dict[str, Any]]) -> list[int]:
    """Places of tokens in :func:`truth` that the client sent without having read that an engine had sampled them.

    Such a token is the end of a turn, say. It is a part of the prompt if the client's request was there before the
    engine's event, else it was sampled.
    """
    _, samples = _traced(rollout, journal)
    return [
        place
        for place, sample in enumerate(samples)
        if sample is not None and sample[1] >= rollout.read.get(sample[0], len(samples))
    ]


def _traced(
    rollout: RolledSession, journal: dict[str, dict[str, Any]]
) -> tuple[list[int], list[tuple[str, int] | None]]:
    """Tokens of the last turn, and for each the rid that sampled it and its number there; None: a prompt's."""
    tokens: list[int] = []
    samples: list[tuple[str, int] | None] = []
    for rid in rollout.rids:
        entry = journal[rid]
        same = 0
        while same < min(len(tokens), len(entry["input_ids"])) and tokens[same] == entry["input_ids"][same]:
            same += 1
        samples = samples[:same] + [None] * (len(entry["input_ids"]) - same)
        tokens = entry["input_ids"] + entry["output_ids"]
        samples += [(rid, number) for number in range(len(entry["output_ids"]))]
    return tokens, samples
