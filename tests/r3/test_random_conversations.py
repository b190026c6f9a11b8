"""Random conversations with forks, cuts, streams that clients leave, and weight updates.

Here the experts also depend on the weights. So a row of other weights than those that processed its token is wrong.
What is told as exact must be right; everything else must be said.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest

import slime_engine.stateless
from r3.replays import PROMPT, SAMPLING, SHAPE, Replay, replaying, rows_in
from slime_engine.model import NgramModel
from slime_engine.moe import routed_experts
from slime_engine.settings import Settings

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: Reasons that these conversations may have.
EXPECTED = {
    "not_told",
    "starts_later",
    "other_weight_version",
    "cut_inside_token",
    "evicted",
    "not_consumed",
    "uncovered_text",
}
WAYS: tuple[dict[str, Any], ...] = (
    *({},) * 6,
    {"return_routed_experts": True},
    {"return_routed_experts": False},
    {"return_routed_experts": True, "routed_experts_start_len": 2},
)


@dataclass
class Weights:
    """The weight version of all engines. Each version moves all experts by one."""

    version: int = 0

    def experts(self, ids: Sequence[int], start: int, settings: Settings) -> npt.NDArray[np.int32]:
        return (routed_experts(ids, start, settings) + np.int32(self.version)) % np.int32(
            settings.moe_experts
        )


@dataclass
class Conversations:
    """Some sessions of a client. ``texts``: what it may continue, by session."""

    replay: Replay
    random: random.Random
    weights: Weights
    texts: dict[str, list[str]] = field(default_factory=dict)
    told: Counter[str | None] = field(default_factory=Counter)

    async def step(self) -> None:
        choose = self.random.random()
        if choose < 0.1:
            await self.update_weights()
        elif choose < 0.2 or not self.texts:
            name = f"s{len(self.texts)}"
            self.texts[name] = []
            await self.turn(name, PROMPT + self.random.choice(("", "Once ", name)))
        else:
            name, texts = self.random.choice(list(self.texts.items()))
            text = texts[-1] if self.random.random() < 0.7 else self.random.choice(texts)
            await self.turn(name, text + self.random.choice(("<|im_end|>\nGo on.", " and", "<|im_end|>\n")))

    async def update_weights(self) -> None:
        self.weights.version += 1
        update = {"new_version": str(self.weights.version), "abort_all_requests": False}
        answer = await self.replay.running.client.post("/update_weight_version", json=update)
        assert answer.status_code == 200, answer.text

    async def turn(self, name: str, text: str) -> None:
        sampling = SAMPLING | {"max_new_tokens": self.random.randrange(1, 12)}
        way = dict(self.random.choice(WAYS))
        manner = self.random.choice(("whole", "whole", "stream", "left", "cut", "samples"))
        if manner == "samples":
            outputs = await self.replay.generate(text, name, sampling_params=sampling | {"n": 2}, **way)
            answers = [output["text"] for output in outputs]
        elif manner == "left":
            answers = [await self.left(name, text, way)]
        elif manner == "stream":
            events = await self.replay.generate(text, name, stream=True, sampling_params=sampling, **way)
            answers = [events[-1]["text"]]
        else:
            answers = [(await self.replay.generate(text, name, sampling_params=sampling, **way))["text"]]
        if manner == "cut":
            answers = [answer[: self.random.randrange(len(answer) + 1)] for answer in answers]
        self.texts[name] += [text + answer for answer in answers]

    async def left(self, name: str, text: str, way: dict[str, Any]) -> str:
        """The beginning of an answer whose stream the client leaves."""
        sampling = SAMPLING | {"max_new_tokens": 5000}
        body = {"text": text, "stream": True, "sampling_params": sampling, "session_id": name, **way}
        async with self.replay.running.client.stream("POST", "/generate", json=body) as reply:
            size, last = self.random.randrange(1, 2000), ""
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    last = line
                if len(last) > size:
                    break
        start: str = orjson.loads(last.removeprefix("data: "))["text"]
        return start

    async def check(self) -> None:
        for name, texts in self.texts.items():
            path = f"/trajectories/{name}?return_routed_experts=true"
            answer = await self.replay.running.client.get(path)
            for record in answer.json().get("trajectories", ()):
                self.check_record(record)
            for text in texts:
                self.check_record(await self.replay.retrieve(text, name))

    def check_record(self, record: dict[str, Any]) -> None:
        reason = record["routed_experts_reason"]
        self.told[reason] += 1
        assert record["experts_exact"] is (reason is None)
        if reason is not None:
            assert record["routed_experts"] is None
            assert reason in EXPECTED
            return
        assert record["exact"]
        rows = rows_in(record["routed_experts"])
        assert rows.shape == (record["token_length"] - 1, *SHAPE)
        plain = self.replay.rows(record["tokens"])
        moved = (rows - plain) % self.replay.hosts[0].settings.moe_experts
        for place, (row, wanted) in enumerate(zip(moved, self.versions_of(record), strict=True)):
            assert set(row.ravel().tolist()) <= wanted, f"row {place} of {len(moved)}"
            assert len(set(row.ravel().tolist())) == 1

    def versions_of(self, record: dict[str, Any]) -> list[set[int]]:
        """For each token but the last, how far its experts are moved: by the version of the turn that processed it.

        That is the version of the next sampled token. The client may have kept only a part of a response: then the
        last token of that part was processed in its own turn already.
        """
        experts = self.replay.hosts[0].settings.moe_experts
        versions = [
            -1 if version in (-1, "default") else int(version) for version in record["generation_versions"]
        ]
        versions = [max(version, 0) for version in versions]
        mask = record["loss_mask"]
        found: list[set[int]] = []
        following = 0
        for place in range(len(mask) - 1, 0, -1):
            following = versions[place] if mask[place] else following
            wanted = {following} | ({versions[place - 1]} if mask[place - 1] else set())
            found.append({version % experts for version in wanted})
        return found[::-1]


@pytest.mark.parametrize("seed", range(6))
async def test_exact_experts_are_right_and_the_others_are_said(
    start: Start, model: NgramModel, checkpoint: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Weights()
    monkeypatch.setattr(slime_engine.stateless, "routed_experts", weights.experts)
    flags = ("--r3-max-bytes", "0")
    async with replaying(start, model, checkpoint, *flags, engines=2, tokens_per_second=2000) as replay:
        conversations = Conversations(replay, random.Random(seed), weights)
        for _ in range(40):
            await conversations.step()
        await conversations.check()
        assert conversations.told[None] > sum(conversations.told.values()) / 3, conversations.told
