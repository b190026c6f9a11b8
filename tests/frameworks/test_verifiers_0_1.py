"""verifiers 0.1, which cannot live beside later ones: each rollout of its environments is a session of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed")
if not version("verifiers").startswith("0.1."):
    pytest.skip("verifiers is a later one", allow_module_level=True)

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, clock, weather
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

EXAMPLES, ROLLOUTS_EACH = 2, 2
ROLLOUTS = EXAMPLES * ROLLOUTS_EACH


def reward(completion: Any, **more: Any) -> float:
    return float(completion[-1]["content"].strip() == LAST_WORDS)


async def roll_out(fleet: Fleet, meanwhile: Callable[[], Awaitable[None]]) -> list[Any]:
    """Outputs of its environment with tools; ``meanwhile`` is called when all rollouts have begun."""
    examples: Any = Dataset.from_list(
        [{"question": f"{number}. {QUESTION}", "answer": LAST_WORDS} for number in range(EXAMPLES)]
    )
    environment = vf.ToolEnv(
        tools=[weather, clock],
        max_turns=6,
        eval_dataset=examples,
        system_prompt=SYSTEM,
        rubric=vf.Rubric(funcs=[reward]),
    )
    endpoint = ClientConfig(
        api_key_var="NOT_SET",
        api_base_url=f"{fleet.url}/v1",
        extra_headers_from_state={"X-Session-ID": "trajectory_id"},
    )
    sampling = {"max_tokens": 600, "logprobs": True, "extra_body": {"return_token_ids": True}}
    outputs: list[Any] = []

    async def evaluate() -> None:
        evaluated = await environment.evaluate(
            client=endpoint,
            model="policy",
            sampling_args=sampling,
            num_examples=EXAMPLES,
            rollouts_per_example=ROLLOUTS_EACH,
            state_columns=["trajectory", "trajectory_id"],
        )
        outputs.extend(evaluated["outputs"])

    async with anyio.create_task_group() as rollouts:
        rollouts.start_soon(evaluate)
        await fleet.generating(ROLLOUTS)
        await meanwhile()
    assert len(outputs) == ROLLOUTS
    return outputs


def assert_told(fleet: Fleet, steps: list[Any]) -> None:
    """Each step is one entry of a journal."""
    keys = ("prompt_ids", "completion_ids", "completion_logprobs")
    entries = [
        [list(entry.input_ids), list(entry.output_ids), list(entry.output_logprobs)]
        for entry in fleet.entries()
    ]
    for step in steps:
        assert [step["tokens"][key] for key in keys] in entries


async def test_rollouts_with_tools_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        for output in await roll_out(fleet, lambda: fleet.update_weights("2")):
            assert (output["reward"], len(output["trajectory"])) == (1.0, 3)
            assert_told(fleet, output["trajectory"])
            [record] = await fleet.trajectories(output["trajectory_id"])
            assert {"1", "2"} <= set(record["generation_versions"])
            last = output["trajectory"][-1]["tokens"]
            assert record["tokens"] == last["prompt_ids"] + last["completion_ids"]
            for result in RESULTS:
                assert result in record["text"]
        assert len(fleet.entries()) == 3 * ROLLOUTS


async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for output in await roll_out(fleet, fleet.abort):
            [step] = output["trajectory"]
            assert step["is_truncated"]
            assert_told(fleet, [step])
            [record] = await fleet.trajectories(output["trajectory_id"])
            assert record["finish_reason"]["type"] == "abort"
