"""Random conversations with forks, cuts, streams that clients leave, and weight updates.

Here the experts also depend on the weights. So a row of other weights than those that processed its token is wrong.
Some answers are aborted and resumed. In some tests most rows are dropped, or all are moved to a store.
What is told as exact must be right; everything else must be said.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from plugged import until
from r3.replays import PROMPT, SAMPLING, Replay, replaying
from r3.versioned import EXPERTS, moved, recompute, versioned_experts
from slime_engine.model import NgramModel

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
    "dropped",
}
WAYS: tuple[dict[str, Any], ...] = (
    *({},) * 6,
    {"return_routed_experts": True},
    {"return_routed_experts": False},
    {"return_routed_experts": True, "routed_experts_start_len": 2},
)


@dataclass
class Conversations:
    """Some sessions of a client. ``texts``: what it may continue, by session."""

    replay: Replay
    random: random.Random
    version: int = 0
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
        """Change the weights of all engines. Streams that a client has left may still run: some are computed again."""
        self.version += 1
        retracts = self.random.random() < 0.5
        if retracts:
            await self.replay.at_engines("/pause_generation", mode="retract")
            recompute(self.replay)
        update = {"new_version": str(self.version), "abort_all_requests": False}
        answer = await self.replay.running.client.post("/update_weight_version", json=update)
        assert answer.status_code == 200, answer.text
        if retracts:
            await self.replay.at_engines("/continue_generation")

    async def turn(self, name: str, text: str) -> None:
        sampling = SAMPLING | {"max_new_tokens": self.random.randrange(1, 12)}
        way = dict(self.random.choice(WAYS))
        manner = self.random.choice(("whole", "whole", "stream", "left", "cut", "samples", "aborted"))
        if not self.texts[name]:  # other turns follow it, and some of them must have exact experts
            way, manner = {}, "whole" if manner == "left" else manner
        if manner == "samples":
            outputs = await self.replay.generate(text, name, sampling_params=sampling | {"n": 2}, **way)
            answers = [output["text"] for output in outputs]
        elif manner == "aborted":
            answers = [await self.aborted(name, text, way)]
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

    async def aborted(self, name: str, text: str, way: dict[str, Any]) -> str:
        """An answer that is resumed, since all engines have aborted it."""
        sampling = SAMPLING | {"max_new_tokens": 30}
        outputs: list[Any] = []

        async def generate() -> None:
            outputs.append(await self.replay.generate(text, name, sampling_params=sampling, **way))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await until(self.runs_whole)
            for host in self.replay.hosts:  # at once: a call might come too late
                host.engine.scheduler.abort_prefix("")
        answer: str = outputs[0]["text"]
        return answer

    def runs_whole(self) -> bool:
        """True while an answer is made that is no stream: streams may be left ones."""
        schedulers = [host.engine.scheduler for host in self.replay.hosts]
        return any(not one.request.stream for each in schedulers for one in each.running.values())

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

    async def found(self, client: httpx.AsyncClient) -> list[Any]:
        """By the router of ``client``, the experts of each leaf, and why there are none."""
        answers = []
        for name in self.texts:
            path = f"/trajectories/{name}?return_routed_experts=true"
            for leaf in (await client.get(path)).json().get("trajectories", ()):
                answers.append((leaf["tokens"], leaf["routed_experts"], leaf["routed_experts_reason"]))
        return answers

    def check_record(self, record: dict[str, Any]) -> None:
        reason = record["routed_experts_reason"]
        self.told[reason] += 1
        assert record["experts_exact"] is (reason is None)
        if reason is not None:
            assert record["routed_experts"] is None
            assert reason in EXPECTED
            return
        assert record["exact"]
        versions, mask = record["generation_versions"], record["loss_mask"]
        under = moved(self.replay, record)
        following = 0
        for place in range(len(under) - 1, -1, -1):
            following = _number(versions[place + 1]) if mask[place + 1] else following
            if under[place] != following:
                # The last token that the client kept of a response: its own turn has processed it already.
                own = self.versions_after(record, place) if mask[place] else set()
                assert under[place] in own, f"row {place} of {len(under)}: wanted {following} or one of {own}"

    def versions_after(self, record: dict[str, Any], place: int) -> set[int]:
        """By the journals, the versions that sampled the next token in the turn that sampled token ``place``."""
        beginning, found = record["tokens"][: place + 1], set()
        entries: dict[str, list[tuple[list[int], list[str]]]] = {}
        for host in self.replay.hosts:
            for entry in host.engine.journal.entries():
                told = entry.as_json()
                tokens = told["input_ids"] + told["output_ids"]
                if tokens[: place + 1] == beginning:
                    versions = [""] * len(told["input_ids"]) + told["output_versions"]
                    entries.setdefault(told["rid"], []).append((tokens, versions))
        for attempts in entries.values():
            if any(versions[place] == record["generation_versions"][place] for _, versions in attempts):
                after = {versions[place + 1] for _, versions in attempts if len(versions) > place + 1}
                found |= {_number(version) for version in after if version}
        return found


def _number(version: str) -> int:
    """By how much experts of ``version`` are moved."""
    return int(version) % EXPERTS if version.isdecimal() else 0


@pytest.mark.parametrize("seed", range(5))
async def test_exact_experts_are_right_and_the_others_are_said(
    start: Start,
    model: NgramModel,
    checkpoint: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    versioned_experts(monkeypatch)
    is_small, is_cold = seed % 3 == 2, seed == 3
    memory = "1" if is_cold else "1200" if is_small else "0"
    flags = ["--r3-max-bytes", memory, "--resume-aborted", "--abort-retry-wait-s", "0"]
    if is_cold:  # all tokens and rows are moved to the disk
        flags += ["--radix-tree-max-size", "1", "--middleware-paths", "slime_tiered_store"]
        flags += ["--store-ssd", str(tmp_path / "disk"), "--store-ssd-bytes", str(8 << 20)]
        flags += ["--store-memory-bytes", "4096"]
    async with replaying(start, model, checkpoint, *flags, engines=2, tokens_per_second=2000) as replay:
        conversations = Conversations(replay, random.Random(seed))
        for _ in range(30):
            await conversations.step()
        await conversations.check()
        told = conversations.told
        assert told[None] > (0 if is_small else told.total() / 10), told
        assert bool(told["dropped"]) is is_small, told
        stats = (await replay.running.client.get("/cache_stats")).json()
        assert stats["aborts"]["resumed"]
        assert bool(stats["token_rows"]["routed_experts"]["stored_bytes"]) is is_cold
        if is_cold:
            await check_after_a_kill(start, conversations, checkpoint, flags, tmp_path)


async def check_after_a_kill(
    start: Start, conversations: Conversations, checkpoint: str, flags: list[str], path: Path
) -> None:
    """Another router that begins with what is on the disk knows the same experts."""
    replay = conversations.replay
    cold, rows = (replay.running.router.components.get(name) for name in ("ownership", "token_rows"))
    await until(lambda: not cold._trajectories.overdue(1))
    await until(lambda: not any(one["bytes"] for one in rows.as_dict().values()))
    await cold._saver.writer.flush()
    shutil.copytree(path / "disk", path / "copy")
    before = await conversations.found(replay.running.client)
    flags = [str(path / "copy") if flag == str(path / "disk") else flag for flag in flags]
    flags += ["--plugin", "radix_cache", "--plugin", "r3", "--hf-checkpoint", checkpoint]
    async with start(*flags, "--worker-urls", *replay.urls) as running:
        await until(lambda: running.router.pool.healthy == 2)
        after = await conversations.found(running.client)
    for (tokens, experts, reason), found in zip(before, after, strict=True):
        assert found[:2] == (tokens, experts)
        assert found[2] in (reason, "not_recorded" if reason is not None else None)
