"""openai-agents in its chat mode: it runs the tools, and agents as tools of agents."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agents", reason="openai-agents is not installed")
pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

from clients.rolling import LAST_WORDS, QUESTION, SYSTEM, Rolling, Rollout, clock, weather
from openai_.chat_models.families import Call, Words

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_conversation_with_tools(rollout: Rollout, stream: bool) -> None:
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key="none", default_headers=rollout.headers
    ) as client:
        agent: Any = Agent(
            "traveller",
            instructions=SYSTEM,
            tools=[function_tool(weather), function_tool(clock)],
            model=OpenAIChatCompletionsModel("policy", client),
        )
        if stream:
            result: Any = Runner.run_streamed(agent, QUESTION)
            kinds = {event.type async for event in result.stream_events()}
            assert {"raw_response_event", "run_item_stream_event"} <= kinds
        else:
            result = await Runner.run(agent, QUESTION)
    assert result.final_output == LAST_WORDS
    rollout.judge(turns=3)


async def test_agents_as_tools_of_an_agent(rolling: Rolling) -> None:
    """One session, three conversations, two of them at the same time."""
    guide_says = (
        Words(thoughts="When?", calls=(Call("clock", '{"city" :"東京"}'),)),
        Words("At night.", "So."),
    )
    rollout = rolling(
        Words(calls=(Call("guide", '{"input":"Zürich?"}'), Call("guide", '{"input": "S\\u00e3o Paulo?"}'))),
        Words(LAST_WORDS, "Clear."),
        others={"You know the town.": guide_says},
        results=(clock("東京"), "At night."),
    )
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key="none", default_headers=rollout.headers
    ) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        guide: Any = Agent(
            "guide", instructions="You know the town.", tools=[function_tool(clock)], model=model
        )
        ask = guide.as_tool("guide", "Who knows the town.")
        agent: Any = Agent("traveller", instructions=SYSTEM, tools=[ask], model=model)
        result = await Runner.run(agent, QUESTION)
    assert result.final_output == LAST_WORDS
    rollout.judge(turns=6, samples=3)
