"""Conversations of every kind with embedded engines, held against their journals: equal, or said not to be."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import anyio
import pytest

from radix_cache.rolled import RolledSession, journals, roll, truth, unread
from radix_cache.scripted import bits

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: Ways of a client to make its next prompt out of an answer.
MANNERS = ("template", "strip", "cut", "append", "leave_early")


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
async def test_every_conversation_is_exact_or_says_why_not(start: Start, incremental: bool) -> None:
    flags = ["--engine-incremental-streaming-output"] if incremental else []
    async with start(
        "--plugin", "engine", "--engine-workers", "2", "--engine-seed", "1", *flags, "--plugin", "radix_cache"
    ) as running:
        client = running.client
        rollouts = [
            RolledSession(f"{manner}-{number}", random.Random(f"{manner}{number}"), manner)
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
            for place in unread(rollout, entries):
                if place < count and not answer["loss_mask"][place]:
                    known[place] = 0, 0.0, -1
            assert answer["tokens"] == tokens, rollout
            assert answer["loss_mask"] == [mask for mask, _, _ in known]
            assert bits(answer["rollout_logp"]) == bits([logprob for _, logprob, _ in known])
            assert answer["generation_versions"] == [version for _, _, version in known]
        stats = (await client.get("/cache_stats")).json()
    assert outcomes["exact"] >= 25
    assert stats["unrecorded"] == {}
    assert stats["untouched"] == {}
    assert stats["per_turn"]["4"]["requests"] > 0
