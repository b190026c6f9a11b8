"""Histories that clients and templates have changed: the tokens are the engine's, or the reply says so.

Families of models, times habits of clients, streamed with tools or neither: a habit has one with a family, the other
with the next. With ``SLIME_ROUTER_DRIFT=all`` it has both, and also only streamed and only with tools. ``pytest -s``
prints how many conversations rendering and tokenising the messages again would have broken, and how many are one exact
sample here.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat_models.families import FAMILIES, Family
from openai_.chat_models.steered import Steered, by_text, speaking
from openai_.drift.clients import CLIENTS
from openai_.drift.rollouts import DriftRollout, Plan

if TYPE_CHECKING:
    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

_ALL = os.environ.get("SLIME_ROUTER_DRIFT") == "all"


def by_name(family: Family) -> str:
    return family.name


def inherited(prompt: list[int], known: list[tuple[list[int], list[int]]]) -> list[int]:
    """The mask of ``prompt``: what was sampled behind the very same tokens stays sampled."""
    best: list[int] = []
    for tokens, mask in known:
        pairs = enumerate(zip(tokens, prompt, strict=False))
        common = next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(prompt)))
        best = max(best, mask[:common], key=len)
    return best + [0] * (len(prompt) - len(best))


async def judged(rollout: DriftRollout, running: Running, engine: Steered) -> Counter[str]:
    """Judge one conversation, and count its outcomes. Raises AssertionError for wrong tokens that were not flagged."""
    answer = await running.client.get(f"/trajectories/{rollout.session}")
    leaves: list[dict[str, Any]] = answer.json()["trajectories"]
    journal = {
        (*entry.input_ids, *entry.output_ids): entry
        for entry in engine.journal()
        if list(entry.input_ids) in rollout.prompts
    }
    known: list[tuple[list[int], list[int]]] = []
    for number, (prompt, reply) in enumerate(zip(rollout.prompts, rollout.replies, strict=True)):
        tokens = prompt + reply["token_ids"]
        assert tuple(tokens) in journal
        if rollout.origins[number] in ("exact", "restored"):
            before = known[-1][0]
            assert prompt[: len(before)] == before, "not the stored tokens of the turn before"
            assert rollout.reads_alike[number] == (rollout.origins[number] == "exact")
        else:
            assert rollout.origins[number] == ("fresh" if number == 0 else "template")
        mask = inherited(prompt, known) + [1] * len(reply["token_ids"])
        known.append((tokens, mask))
    for leaf in leaves:
        assert leaf["exact"]
        entry = journal[tuple(leaf["tokens"])]
        number = rollout.prompts.index(list(entry.input_ids))
        assert leaf["loss_mask"] == known[number][1]
        size = len(entry.output_ids)
        assert leaf["rollout_logp"][-size:] == list(entry.output_logprobs)
    return Counter(
        {
            "conversations": 1,
            "one exact sample": len(leaves) == 1,
            "restored": "restored" in rollout.origins,
            "broken by rendering anew": rollout.rendered_anew()[: len(rollout.tokens)] != rollout.tokens,
        }
    )


def _ways(mode: str, number: int) -> list[tuple[bool, bool]]:
    """Return whether a conversation is streamed, and whether it has tools, for each conversation of a habit."""
    if _ALL:
        return [(stream, tools) for stream in (False, True) for tools in (False, True)]
    ways = [(False, False), (True, True)]
    return ways if mode == "template" else [ways[number % 2]]


@pytest.mark.parametrize("mode", ["exact", "template"])
@pytest.mark.parametrize("family", FAMILIES, ids=by_name)
async def test_history_stays_exact(start: Start, family: Family, mode: str) -> None:
    plan = Plan(family)
    counts: Counter[str] = Counter()
    async with (
        speaking(family, by_text(family.tokenizer, plan), seed=5) as engine,
        start(
            *("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint),
            *("--plugin", "openai", "--history", mode, "--worker-urls", engine.url),
        ) as running,
    ):
        habits = list(CLIENTS.items())[: None if mode == "exact" else 3]
        for number, (name, habit) in enumerate(habits, FAMILIES.index(family)):
            for stream, tools in _ways(mode, number):
                session = f"{name}-{stream}-{tools}".replace(" ", "_")
                rollout = DriftRollout(running.client, family, plan, session, habit, stream, tools)
                await rollout.run()
                counts += await judged(rollout, running, engine)
        stats = (await running.client.get("/cache_stats")).json()
    assert (stats["untouched"], stats["unrecorded"]) == ({}, {})
    print(f"{family.name:12} --history {mode:8} {dict(counts)}")  # noqa: T201  # the table
    assert counts["broken by rendering anew"] > counts["conversations"] / 2
    if mode == "exact":
        assert counts["one exact sample"] == counts["conversations"]
