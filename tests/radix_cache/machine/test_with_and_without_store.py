"""The same conversations at two routers, one of which demotes everything: both say the same, answer by answer.

One request comes after the other, so nothing is left to timing. To play at least 2,000 conversations::

    SLIME_ROUTER_CONVERSATIONS=2000 pytest -s tests/radix_cache/machine/test_with_and_without_store.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from radix_cache.claims import until
from radix_cache.machine.adversary import Pause
from radix_cache.machine.experts import SHAPE
from radix_cache.machine.rollouts import CHATML, Conversation, Stage, acting, routed, stage_of
from radix_cache.machine.turns import Turn
from radix_cache.machine.worlds import WORLDS, World
from slime_engine.tokenizer import EngineTokenizer

pytestmark = pytest.mark.anyio

_CONVERSATIONS = int(os.environ.get("SLIME_ROUTER_CONVERSATIONS", "8"))
#: Conversations of one router.
_AT_ONCE = 8


class TwinClient:
    """Everything that one client does. ``told``: what it asked and what it was told, call by call."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._random = Random(seed)
        self.told: list[tuple[Any, Any]] = []

    async def play(self) -> None:
        """Begin conversations, go on with them, and ask for tokens of any of them meanwhile."""
        while len(self._stage.conversations) < _AT_ONCE:
            kind = self._random.random()
            known = self._stage.conversations
            if kind < 0.3 or not known:
                await self._begin()
            elif kind < 0.4:
                await self._fork()
            elif kind < 0.45:
                await self._update_weights()
            elif kind < 0.5:
                await self._forget()
            elif kind < 0.6:
                await self._overlap()
            else:
                one = self._random.choice(known)
                await self._stage.go_on(one, self._random)
                await self._turn(one)
            await self._read(self._random.choice(self._stage.conversations))
        for one in self._stage.conversations:
            await self._retrieve(one.text, one.name)
        for session in dict.fromkeys(one.name for one in self._stage.conversations):
            if session is not None:
                await self._look_at(session)

    async def _begin(self) -> None:
        prompt = CHATML.system + self._stage.asked(self._random)
        name = self._random.choice(("", "", "", None))
        for _ in range(self._random.randint(1, 3)):
            await self._turn(self._stage.begin(prompt, name))

    async def _fork(self) -> None:
        origin = self._random.choice(self._stage.conversations)
        size = self._random.choice((len(origin.text), self._random.randint(1, len(origin.text))))
        await self._turn(self._stage.begin(origin.text[:size] + self._stage.asked(self._random)))

    async def _update_weights(self) -> None:
        engine = self._stage.engine
        engine.version += 1
        announced = {"weight_version": str(engine.version)}
        answer = await self._stage.client.post("/weight_version", json=announced)
        self.told.append((announced, answer.status_code))

    async def _forget(self) -> None:
        session = self._random.choice(self._stage.conversations).name
        if session is not None:
            answer = await self._stage.client.delete(f"/sessions/{session}")
            self.told.append((f"delete {session}", (answer.status_code, answer.text)))

    async def _overlap(self) -> None:
        """Other requests while one is answered, which its client then waits for, or leaves."""
        stage, own = self._stage, self._random.choice(self._stage.conversations)
        await stage.go_on(own, self._random)
        turn = stage.turn([own], self._random, calm=True)
        pause = stage.engine.pauses[turn.name] = Pause(self._random.randint(0, 3))
        leaves = self._random.random() < 0.4
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.speak, turn)
            await pause.reached.wait()
            await until(lambda: self._has_heard_all(turn))
            await self._turn(self._random.choice(stage.conversations))
            await self._read(own)
            if self._random.random() < 0.3:
                await self._forget()
            if leaves:
                tasks.cancel_scope.cancel()
            pause.go.set()
        if leaves:
            await until(self._is_idle)
        self._hear(turn)

    async def _has_heard_all(self, turn: Turn) -> bool:
        sent = sum(len(attempt.said) for attempt in self._stage.engine.of(turn.name))
        return not turn.stream or len(turn.so_far[0].events) == sent

    async def _is_idle(self) -> bool:
        workers = (await self._stage.client.get("/workers")).json()["workers"]
        return not any(worker["load"] for worker in workers)

    async def _turn(self, conversation: Conversation) -> None:
        stage = self._stage
        turn = stage.turn([conversation], self._random)
        turn.leave = None  # how much is sampled for a client that has left is left to timing
        await stage.speak(turn)
        self._hear(turn)

    def _hear(self, turn: Turn) -> None:
        stage = self._stage
        turn.check(stage.facts(turn), stage.engine.of(turn.name), stage.reader)
        for one in turn.conversations:
            stage.remember(one)
        for event in (event for one in turn.heard or () for event in one.events):
            for name in ("id", "e2e_latency"):  # the router's own, with its time of start; and times
                event["meta_info"].pop(name, None)
        self.told.append((turn.body, [one.events for one in turn.heard or ()]))

    async def _read(self, conversation: Conversation) -> None:
        """Ask for the tokens of a beginning of what was said, as any session."""
        size = len(conversation.text)
        text = conversation.text[: self._random.choice((size, self._random.randint(1, size)))]
        session = self._random.choice(self._stage.conversations).name
        await self._retrieve(text + self._random.choice(("", "", CHATML.end, "q")), session)
        if session is not None and self._random.random() < 0.2:
            await self._look_at(session)

    async def _retrieve(self, text: str, session: str | None) -> None:
        self.told.append(((text, session), await self._stage.retrieve(text, session)))

    async def _look_at(self, session: str) -> None:
        answer = await self._stage.client.get(f"/trajectories/{session}?return_routed_experts=true")
        self.told.append((session, (answer.status_code, answer.json())))


async def _told(
    tokenizer: EngineTokenizer, checkpoint: str, world: World, seed: int, *flags: str
) -> tuple[list[tuple[Any, Any]], dict[str, Any]]:
    """Return the answers to a client of a router with ``flags``, and the router's counters at the end."""
    retries, resume = (0, 2, 2)[seed % 3], seed % 3 == 1
    experts = ("--plugin", "sessions", "--plugin", "r3", "--r3-shape", *map(str, SHAPE))
    async with (
        acting(tokenizer, CHATML, world, seed=seed, retries=retries) as (engine, worker),
        routed(worker, checkpoint, *experts, *flags, retries=retries, resume=resume) as http,
    ):
        engine.incremental = seed % 2 == 0
        client = TwinClient(stage_of(engine, http, checkpoint, CHATML, world, resume=resume), seed)
        await client.play()
        return client.told, (await http.get("/cache_stats")).json()


def _store(directory: Path, seed: int) -> tuple[str, ...]:
    """Flags of a router that keeps nothing in memory but what requests need, or little in some runs."""
    few = ("1", "1", "100", "400")[seed % 4]
    memory = ("--plugin", "tiered_store", "--store-memory-bytes", str(1 << 20))
    tiers = (
        ("--store-ssd", str(directory / "disk"), "--store-ssd-bytes", str(16 << 20)),
        (),
        ("--store-remote", f"file://{directory}"),
    )
    return "--radix-tree-max-size", few, "--r3-max-bytes", "1", *memory, *tiers[seed % 3]


def _verdicts(told: list[tuple[Any, Any]]) -> Iterator[str]:
    """Of each text why it is not exact, or "exact"; of each session if it is complete."""
    for _, said in told:
        if isinstance(said, dict):
            yield (said["inexact_reason"] or "exact").partition(":")[0]
        elif isinstance(said, tuple) and said[0] == 200 and isinstance(said[1], dict):
            yield "complete" if said[1]["complete"] else "not complete"


@pytest.mark.timeout(0 if _CONVERSATIONS > 1000 else 60)
async def test_demotion_changes_no_answer(
    tokenizer: EngineTokenizer, checkpoint: str, tmp_path: Path
) -> None:
    verdicts, promotions, deleted, lasting = Counter[str](), 0, 0, ("--gc-threshold-k", "0")
    for seed in range(-(-_CONVERSATIONS // _AT_ONCE)):
        directory = tmp_path / str(seed)
        directory.mkdir()
        world = list(WORLDS.values())[-1 - seed % len(WORLDS)]
        kept, _ = await _told(tokenizer, checkpoint, world, seed, *lasting)
        demoted, stats = await _told(tokenizer, checkpoint, world, seed, *lasting, *_store(directory, seed))
        for place, (now, before) in enumerate(zip_longest(demoted, kept)):
            assert now == before, f"seed {seed}, answer {place}"
        assert stats["evictions"].keys() <= {"deleted"}
        deleted += stats["evictions"].get("deleted", 0)
        verdicts.update(_verdicts(demoted))
        promotions += stats["demoted"]["promotions"]
    print(dict(verdicts), promotions)  # noqa: T201  # the figures of a long run
    assert deleted > 0
    assert promotions > verdicts.total()
    assert verdicts["exact"] > 3
    assert verdicts["complete"] > 0
    assert verdicts["uncovered_text"] > 0
