"""Osmosis' agents, which stream always, each below the URL of a session of the router."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("osmosis_ai", reason="osmosis-ai is not installed")

from agents import Runner, function_tool, set_tracing_disabled
from osmosis_ai.rollout.context import RolloutContext
from osmosis_ai.rollout.integrations.agents.openai_agents import (
    OsmosisAgent,
    OsmosisMemorySession,
    OsmosisRolloutModel,
)

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, RESULTS, SYSTEM, clock, weather
from frameworks.fleet import ENDLESS, Fleet, serving_fleet

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

SESSIONS = [f"rollout-{number}" for number in range(4)]


async def roll_out(fleet: Fleet, session: str) -> Any:
    """The sample of a rollout."""
    with RolloutContext(f"{fleet.url}/sessions/{session}/v1", "none", session) as context:
        agent = OsmosisAgent(
            name="agent",
            instructions=SYSTEM,
            model=OsmosisRolloutModel(),
            tools=[function_tool(weather), function_tool(clock)],
        )
        await Runner.run(agent, f"{session}. {QUESTION}", session=OsmosisMemorySession())
        return await context.get_sample()


async def roll_out_all(fleet: Fleet, meanwhile: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Last words of some rollouts by session; ``meanwhile`` is called when all have begun."""
    set_tracing_disabled(True)
    words: dict[str, Any] = {}

    async def one(session: str) -> None:
        sample = await roll_out(fleet, session)
        [content] = sample.messages[-1]["content"]
        words[session] = content["text"]

    async with anyio.create_task_group() as rollouts:
        for session in SESSIONS:
            rollouts.start_soon(one, session)
        await fleet.generating(len(SESSIONS))
        await meanwhile()
    return words


async def test_agents_with_tools_while_weights_change(start: Start) -> None:
    async with serving_fleet(start, *ANSWERS, tokens_per_second=300) as fleet:
        for session, words in (await roll_out_all(fleet, lambda: fleet.update_weights("2"))).items():
            assert words.strip() == LAST_WORDS
            [record] = await fleet.trajectories(session)
            assert {"1", "2"} <= set(record["generation_versions"])
            for result in RESULTS:
                assert result in record["text"]
        assert len(fleet.entries()) == 3 * len(SESSIONS)


async def test_an_aborted_turn_is_kept_as_far_as_it_went(start: Start) -> None:
    async with serving_fleet(start, ENDLESS, tokens_per_second=100) as fleet:
        for session, words in (await roll_out_all(fleet, fleet.abort)).items():
            assert words.startswith("It rains")
            [record] = await fleet.trajectories(session)
            assert record["finish_reason"]["type"] == "abort"
