"""Rollouts that know only text: they send text to the router, and read text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.grpo_tiny import task
from slime_radix_cache.client import AsyncClient

__all__ = ["Rollout", "roll_out"]

_SAMPLING = {"temperature": 1.0, "max_new_tokens": 16}


@dataclass(slots=True)
class Rollout:
    """One sample: its whole text so far, and its answers.

    ``script``: what the user asks for in each turn. ``group``: the number of the script; the rollouts of a script are a
    group. ``ended``: for each answer, True if the model ended it.
    """

    script: Sequence[str]
    group: int
    session: str
    text: str = ""
    answers: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """The reward of the whole conversation."""
        return task.reward(self.script, self.answers, self.ended)


async def roll_out(
    client: AsyncClient, scripts: Sequence[Sequence[str]], *, samples: int, name: str, seed: int
) -> list[Rollout]:
    """Play each script ``samples`` times, all at once. ``name`` makes the session ids unique."""
    rollouts = [
        Rollout(script, group, f"{name}.{group}.{sample}")
        for group, script in enumerate(scripts)
        for sample in range(samples)
    ]
    await asyncio.gather(
        *(_play(client, rollout, seed + 1000 * place) for place, rollout in enumerate(rollouts))
    )
    return rollouts


async def _play(client: AsyncClient, rollout: Rollout, seed: int) -> None:
    for turn, wanted in enumerate(rollout.script):
        rollout.text += task.as_text(wanted, first=turn == 0)
        sampling: dict[str, Any] = {**_SAMPLING, "sampling_seed": seed + turn}
        answer = await client.generate(rollout.text, sampling, session=rollout.session)
        rollout.answers.append(answer["text"])
        rollout.ended.append(answer["meta_info"]["finish_reason"]["type"] == "stop")
        rollout.text += answer["text"]
