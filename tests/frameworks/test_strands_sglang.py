"""strands-sglang: an agent's own record of its tokens, logprobs and experts is what the engines' journals say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("strands_sglang", reason="strands-sglang is not installed")

from strands import Agent, tool
from strands_sglang import SGLangClient, SGLangModel
from transformers import AutoTokenizer

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, SYSTEM, clock, weather
from frameworks.fleet import ENDLESS, Fleet, Sample, serving_fleet
from openai_.chat_models.families import QWEN2_5
from slime_engine.moe import routed_experts

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

MOE = {"moe_layers": 2, "moe_topk": 2}


def model_of(fleet: Fleet, client: Any, **more: Any) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(fleet.checkpoint)
    return SGLangModel(client=client, tokenizer=tokenizer, sampling_params={"max_new_tokens": 600}, **more)


def agent_of(model: Any) -> Any:
    tools: Any = [tool(weather), tool(clock)]
    return Agent(model=model, tools=tools, system_prompt=SYSTEM, callback_handler=None)


def sample_of(rollout: Any) -> Sample:
    """Its record of one conversation; it keeps logprobs of prompts too."""
    logprobs = [
        logprob if trained else 0.0
        for logprob, trained in zip(rollout.logprobs, rollout.loss_mask, strict=True)
    ]
    return Sample(rollout.token_ids, rollout.loss_mask, logprobs)


async def test_agents_with_tools_while_weights_change(start: Start) -> None:
    fleet_of = serving_fleet(
        start, *ANSWERS, family=QWEN2_5, flags=("--plugin", "r3"), tokens_per_second=300, **MOE
    )
    async with fleet_of as fleet, SGLangClient(fleet.url) as client:
        models = [model_of(fleet, client, return_routed_experts=True) for _ in range(4)]
        said: list[str] = []

        async def roll_out(number: int) -> None:
            answer = await agent_of(models[number]).invoke_async(f"{number}. {QUESTION}")
            said.append(str(answer).strip())

        async with anyio.create_task_group() as rollouts:
            for number in range(len(models)):
                rollouts.start_soon(roll_out, number)
            await fleet.generating(len(models))
            await fleet.update_weights("2")
        assert said == [LAST_WORDS] * len(models)
        assert len(fleet.entries()) == 3 * len(models)
        for model in models:
            rollout = model.rollout
            fleet.check(sample_of(rollout))
            experts = rollout.decode_routed_experts(MOE["moe_layers"], MOE["moe_topk"])
            wanted = routed_experts(rollout.token_ids, 0, fleet.engines[0].host.settings)
            assert experts.tolist() == wanted.tolist()
            told = await fleet.retrieve(fleet.family.tokenizer.decode(rollout.token_ids))
            assert (told["tokens"], told["loss_mask"]) == (rollout.token_ids, rollout.loss_mask)
            assert {"1", "2"} <= set(told["generation_versions"])


async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start) -> None:
    async with (
        serving_fleet(start, ENDLESS, family=QWEN2_5, tokens_per_second=100) as fleet,
        SGLangClient(fleet.url) as client,
    ):
        models = [model_of(fleet, client) for _ in range(4)]
        async with anyio.create_task_group() as rollouts:
            for number, model in enumerate(models):
                rollouts.start_soon(agent_of(model).invoke_async, f"{number}. {QUESTION}")
            await fleet.generating(len(models))
            await fleet.abort()
        for model in models:
            fleet.check(sample_of(model.rollout))
        assert {entry.finish_reason["type"] for entry in fleet.entries() if entry.finish_reason} == {"abort"}
