"""ART: the choices of its trajectories, whole and streamed, have the logprobs of the engines' journals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("art", reason="openpipe-art is not installed")

import art
from art.openai import consume_chat_completion_stream

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, TOOLS, call
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
GROUPS, ROLLOUTS_EACH = 2, 2
ROLLOUTS = GROUPS * ROLLOUTS_EACH


async def roll_out(model: Any, session: str, streamed: bool, **options: Any) -> Any:
    """A trajectory of a conversation with tools."""
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{session}. {QUESTION}"},
        ],
        metadata={"session": session},
        reward=0.0,
    )
    completions = model.openai_client().chat.completions
    while trajectory.messages()[-1]["role"] != "assistant":
        answer = await completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            logprobs=True,
            stream=streamed,
            extra_headers={"X-Session-Id": session},
            **options,
        )
        if streamed:
            answer = await consume_chat_completion_stream(answer)
        [choice] = answer.choices
        trajectory.messages_and_choices.append(choice)
        for each in choice.message.tool_calls or ():
            result = call(each.function.name, each.function.arguments)
            trajectory.messages_and_choices.append(
                {"role": "tool", "tool_call_id": each.id, "content": result}
            )
    trajectory.reward = float(choice.message.content.strip() == LAST_WORDS)
    return trajectory


async def gather(
    fleet: Fleet, streamed: bool, meanwhile: Callable[[], Awaitable[None]], **options: Any
) -> list[Any]:
    """Its trajectories of some groups; ``meanwhile`` is called when all rollouts have begun."""
    model: Any = art.Model(
        name="policy",
        project="test",
        inference_api_key="none",
        inference_base_url=f"{fleet.url}/v1",
        inference_model_name="policy",
    )
    groups: list[Any] = []

    async def go() -> None:
        gathered = await art.gather_trajectory_groups(
            art.TrajectoryGroup(
                roll_out(model, f"{group}-{number}", streamed, **options) for number in range(ROLLOUTS_EACH)
            )
            for group in range(GROUPS)
        )
        groups.extend(gathered)

    async with anyio.create_task_group() as rollouts:
        rollouts.start_soon(go)
        await fleet.generating(ROLLOUTS)
        await meanwhile()
    await model.openai_client().close()
    trajectories = [trajectory for group in groups for trajectory in group]
    assert len(trajectories) == ROLLOUTS
    return trajectories


async def record_of(fleet: Fleet, trajectory: Any) -> dict[str, Any]:
    """The router's one record of it, in which its logprobs are, one for each sampled token."""
    [record] = await fleet.trajectories(trajectory.metadata["session"])
    sampled = zip(record["rollout_logp"], record["loss_mask"], strict=True)
    choices = [each for each in trajectory.messages_and_choices if not isinstance(each, dict)]
    told = [token.logprob for choice in choices for token in choice.logprobs.content]
    assert told == [logprob for logprob, trained in sampled if trained]
    return record


@STREAMED
async def test_rollouts_with_tools_while_weights_change(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        for trajectory in await gather(fleet, streamed, lambda: fleet.update_weights("2"), tools=TOOLS):
            assert trajectory.reward == 1.0
            record = await record_of(fleet, trajectory)
            assert {"1", "2"} <= set(record["generation_versions"])
            for result in RESULTS:
                assert result in record["text"]
        assert len(fleet.entries()) == 3 * ROLLOUTS


@STREAMED
async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start, streamed: bool) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for trajectory in await gather(fleet, streamed, fleet.abort):
            record = await record_of(fleet, trajectory)
            assert record["finish_reason"]["type"] == "abort"
