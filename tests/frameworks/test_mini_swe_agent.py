"""mini-swe-agent: its agents run commands, each in a session of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import to_thread

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from frameworks.fleet import Fleet, serving_fleet
from openai_.chat_models.families import Call, Words

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

LOOK = Words(
    "Look first. “日本語” ☔ " * 6,
    "hm",
    (Call("bash", '{"command":  "echo r\\u00e9sum\\u00e9 && ls /nowhere"}'),),
)
AGAIN = Words("And again, in other words “日本語”.", "", (Call("bash", '{"command":"echo two words"}'),))
DONE = Words(
    "Done.", "so", (Call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo yes"}'),)
)
TASKS = 4


def solve(fleet: Fleet, number: int) -> Any:
    """Its agent's result, in a thread."""
    options = {"api_base": f"{fleet.url}/v1", "api_key": "none", "drop_params": True}
    options["extra_headers"] = {"X-Session-Id": f"task-{number}"}
    model = LitellmModel(model_name="hosted_vllm/policy", model_kwargs=options, cost_tracking="ignore_errors")
    templates = {"system_template": "You are an agent.", "instance_template": "Solve {{task}}."}
    agent = DefaultAgent(model, LocalEnvironment(), step_limit=6, cost_limit=0, **templates)
    return agent.run(task=f"number {number}")


async def solve_all(fleet: Fleet, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Some tasks at once, all solved; ``meanwhile`` is called when all have begun."""
    results: list[Any] = []

    async def one(number: int) -> None:
        results.append(await to_thread.run_sync(solve, fleet, number))

    async with anyio.create_task_group() as tasks:
        for number in range(TASKS):
            tasks.start_soon(one, number)
        await fleet.generating(TASKS)
        await meanwhile()
    assert [(result["exit_status"], result["submission"]) for result in results] == [
        ("Submitted", "yes\n")
    ] * TASKS


async def test_tasks_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, LOOK, AGAIN, DONE, tokens_per_second=150) as fleet:
        await solve_all(fleet, lambda: fleet.update_weights("2"))
        assert len(fleet.entries()) == 3 * TASKS
        for number in range(TASKS):
            [record] = await fleet.trajectories(f"task-{number}")
            assert {"1", "2"} <= set(record["generation_versions"])
            assert f"number {number}" in record["text"]
            assert "two words\n" in record["text"], "what the command said"


async def test_an_aborted_turn_is_tried_again(start: Start) -> None:
    """It has no call, so the agent leaves it out and says what is wanted."""
    async with serving_fleet(start, LOOK, AGAIN, DONE, tokens_per_second=150) as fleet:
        await solve_all(fleet, fleet.abort)
        ends = [entry.finish_reason["type"] for entry in fleet.entries() if entry.finish_reason]
        assert (ends.count("abort"), ends.count("stop")) == (TASKS, 3 * TASKS)
        for number in range(TASKS):
            records = await fleet.trajectories(f"task-{number}")
            assert sorted(record["finish_reason"]["type"] for record in records) == ["abort", "stop"]
