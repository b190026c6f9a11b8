"""AReaL: rollouts of several turns by its engine client and workflow, aborted and resumed under new weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from anyio import from_thread, to_thread

pytest.importorskip("areal", reason="areal is not installed")

from areal.api import WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.utils import name_resolve, names
from areal.workflow.multi_turn import MultiTurnWorkflow
from transformers import AutoTokenizer

from frameworks.areal_reward import RIGHT, reward
from frameworks.fleet import Fleet, serving_fleet
from openai_.chat_models.families import QWEN2_5, Words

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

WRONG = (Words("Rio, I think: “日本語”, café. " * 4), Words("Or Zürich, is it not? " * 5))
ROLLOUTS = 4


@pytest.fixture
def trial(tmp_path: Path) -> dict[str, str]:
    """Names of a trial that leaves its files in a directory of the test."""
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(tmp_path)))
    return {"experiment_name": "experiment", "trial_name": "trial"}


def connect(fleet: Fleet, trial: dict[str, str]) -> Any:
    """AReaL's client of one server, which is the router."""
    engine = RemoteSGLangEngine(
        InferenceEngineConfig(
            **trial,
            backend="sglang:d1",
            max_concurrent_rollouts=ROLLOUTS,
            consumer_batch_size=ROLLOUTS,
            setup_timeout=20,
            pause_grace_period=0.1,
        )
    )
    engine.initialize(addr=fleet.url.removeprefix("http://"))
    return engine


def update_weights(engine: Any, trial: dict[str, str]) -> None:
    """As its trainer does: what is generated is aborted, and goes on under version 1."""
    engine.pause()
    engine.pause_generation()
    saved = names.update_weights_from_disk(*trial.values(), 0)
    name_resolve.add(saved, str(time.time()), replace=True)
    meta = WeightUpdateMeta(type="disk", path="/weights", clear_checkpoint_after_load=False)
    engine.update_weights_from_disk(meta).result()
    engine.set_version(1)
    engine.continue_generation()
    engine.resume()


def train(fleet: Fleet, trial: dict[str, str]) -> list[dict[str, Any]]:
    """The trajectories of some rollouts, in a thread; their weights are updated in the middle of turns."""
    tokenizer: Any = AutoTokenizer.from_pretrained(fleet.checkpoint)
    tokenizer.pad_token = tokenizer.eos_token
    settings = GenerationHyperparameters(max_new_tokens=400, n_samples=1, temperature=1.0, max_tokens=8000)
    workflow = MultiTurnWorkflow(reward, settings, tokenizer, max_turns=4, turn_discount=0.9)
    engine = connect(fleet, trial)
    try:
        for number in range(ROLLOUTS):
            engine.submit(
                {"messages": [{"role": "user", "content": f"{number}. Where shall I go?"}]}, workflow
            )
        from_thread.run(fleet.generating, ROLLOUTS)
        update_weights(engine, trial)
        rollouts: list[dict[str, Any]] = engine.wait(ROLLOUTS, timeout=60)
        return [{key: value[0].tolist() for key, value in rollout.items()} for rollout in rollouts]
    finally:
        engine.destroy()


async def test_turns_resumed_under_new_weights_are_the_journals(start: Start, trial: dict[str, str]) -> None:
    async with serving_fleet(start, *WRONG, Words(RIGHT), family=QWEN2_5, tokens_per_second=150) as fleet:
        with anyio.fail_after(100):
            rollouts = await to_thread.run_sync(train, fleet, trial)
        assert len(rollouts) == ROLLOUTS
        for rollout in rollouts:
            record = await fleet.retrieve(fleet.family.tokenizer.decode(rollout["input_ids"]))
            assert (record["tokens"], record["loss_mask"]) == (rollout["input_ids"], rollout["loss_mask"])
            assert np.float32(record["rollout_logp"]).tolist() == rollout["logprobs"]  # a tensor of AReaL's
            assert rollout["rewards"] == pytest.approx(0.9**2), "three turns"
            assert set(rollout["versions"]) == {-1, 0, 1}
            assert set(record["generation_versions"]) == {-1, "1"}, "its update names no version"
        ends = [entry.finish_reason["type"] for entry in fleet.entries() if entry.finish_reason]
        assert "abort" in ends
        assert ends.count("stop") == 3 * ROLLOUTS
