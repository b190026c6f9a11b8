"""The four runs. Each has a router with an embedded engine, rollouts, and a trainer.

The trainer updates the engine's weights through the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from examples.grpo_tiny.measure import differences
from examples.grpo_tiny.models import LAYERS, TOP_K, save_model
from examples.grpo_tiny.rollouts import Rollout, roll_out
from examples.grpo_tiny.samples import Sample, advantages, recorded, tokenised_again
from examples.grpo_tiny.task import scripts
from examples.grpo_tiny.trainer import Trainer
from router_core.cli import build
from router_core.types import ASGIApp
from slime_http.serving import serving
from slime_radix_cache.client import AsyncClient

__all__ = ["RUNS", "Run", "Size", "Step", "train"]


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train. ``exact``: train on the recorded tokens; False: on the text tokenised again.

    ``replay``: the trainer uses the recorded experts.
    """

    name: str
    moe: bool
    exact: bool
    replay: bool


RUNS = (
    Run("dense, exact tokens", moe=False, exact=True, replay=False),
    Run("dense, text tokenised again", moe=False, exact=False, replay=False),
    Run("MoE, experts replayed", moe=True, exact=True, replay=True),
    Run("MoE, experts not replayed", moe=True, exact=True, replay=False),
)


@dataclass(frozen=True, slots=True)
class Size:
    """Steps of a run; turns of a conversation, and samples of each conversation in a step."""

    steps: int = 70
    turns: int = 2
    samples: int = 16


@dataclass(frozen=True, slots=True)
class Step:
    """The mean reward of a step, and the differences between the trainer's log-probabilities and the rollout's.

    ``other_tokens``: the share of samples whose trained tokens differ from the sampled ones.
    """

    reward: float
    mean_difference: float
    p99_difference: float
    max_difference: float
    other_tokens: float


async def train(
    run: Run, size: Size, directory: Path, *, seed: int, on_step: Callable[[int, Step], None]
) -> list[Step]:
    """Train, and return the steps. Runs with the same ``moe`` and ``seed`` begin with the same weights and seeds."""
    checkpoint = save_model(directory, moe=run.moe, seed=seed)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    trainer = Trainer(checkpoint, replay=run.replay)
    steps: list[Step] = []
    async with serving(_router(run, checkpoint)) as url, AsyncClient(url) as client:
        for number in range(size.steps):
            played = await roll_out(
                client,
                scripts(size.turns),
                samples=size.samples,
                name=f"step{number}",
                seed=seed + 1_000_000 * number,
            )
            sampled = [
                recorded(await client.retrieve(each.text, session=each.session, routed_experts=run.moe))
                for each in played
            ]
            trained = sampled if run.exact else [tokenised_again(each, tokenizer) for each in played]
            logprobs = trainer.step(trained, advantages(played))
            found = [
                difference
                for args in zip(sampled, trained, logprobs, strict=True)
                for difference in differences(*args, tokenizer)
            ]
            steps.append(_step(played, sampled, trained, found))
            on_step(number, steps[-1])
            await _update(url, trainer.weights(), version=str(number + 1))
    return steps


def _router(run: Run, checkpoint: Path) -> ASGIApp:
    """Return a router with an engine in it. In a cluster, engines are separate processes: see ``--worker-urls``."""
    flags = ["--plugin", "engine", "--engine-backend", "transformers", "--engine-model", str(checkpoint)]
    flags += ["--plugin", "radix_cache", "--log-level", "warn"]
    if run.moe:
        flags += ["--plugin", "r3", "--r3-shape", str(LAYERS), str(TOP_K)]
    _, app = build(flags)
    return app


def _step(
    played: Sequence[Rollout], sampled: Sequence[Sample], trained: Sequence[Sample], found: Sequence[float]
) -> Step:
    other = [not np.array_equal(one.tokens, two.tokens) for one, two in zip(sampled, trained, strict=True)]
    return Step(
        reward=float(np.mean([each.reward for each in played])),
        mean_difference=float(np.mean(found)),
        p99_difference=float(np.quantile(found, 0.99)),
        max_difference=max(found),
        other_tokens=float(np.mean(other)),
    )


async def _update(url: str, weights: str, *, version: str) -> None:
    """Pause, give all engines the new weights, and continue. The embedded engine reads safetensors in base64."""
    update: dict[str, Any] = {
        "serialized_named_tensors": [weights],
        "load_format": "safetensors",
        "weight_version": version,
    }
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600) as client:
        for path, body in (
            ("/pause_generation", {}),
            ("/update_weights_from_tensor", update),
            ("/continue_generation", {}),
        ):
            answer = await client.post(path, json=body)
            if not answer.is_success:
                raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")
