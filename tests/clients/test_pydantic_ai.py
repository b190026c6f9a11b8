"""pydantic-ai: it calls the tools, and forces calls where it wants an object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from clients.rolling import (
    ANSWERS,
    FORCED_CALLS,
    LAST_WORDS,
    QUESTION,
    RESULTS,
    SYSTEM,
    Rolling,
    Rollout,
    clock,
    weather,
)
from clients.schemas import bound_answers
from openai_.chat_models.families import QWEN2_5, Words

pytestmark = pytest.mark.anyio


class Trip(BaseModel):
    """A trip's destination."""

    destination: str
    umbrellas: int


@asynccontextmanager
async def agent(rollout: Rollout, **options: Any) -> AsyncIterator[Any]:
    async with AsyncOpenAI(base_url=rollout.base_url, api_key="none") as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        settings: Any = {"extra_headers": rollout.headers}
        yield Agent(model, system_prompt=SYSTEM, model_settings=settings, **options)


async def test_a_conversation_with_tools(rollout: Rollout) -> None:
    async with agent(rollout, tools=[weather, clock]) as traveller:
        result = await traveller.run(QUESTION)
    assert result.output == LAST_WORDS
    assert result.usage.requests == 3
    rollout.judge(turns=3)


async def test_a_stream(rollout: Rollout) -> None:
    kinds = set()

    async def listen(_: Any, events: Any) -> None:
        async for event in events:
            kinds.add(event.event_kind)

    async with agent(rollout, tools=[weather, clock]) as traveller:
        result = await traveller.run(QUESTION, event_stream_handler=listen)
    assert result.output == LAST_WORDS
    assert {"part_start", "part_delta", "function_tool_call"} <= kinds
    rollout.judge(turns=3)


async def test_a_second_question(rolling: Rolling) -> None:
    """The template takes old thoughts out then; the tokens keep them."""
    rollout = rolling(*ANSWERS, Words("Nowhere.", "Again?"), results=RESULTS)
    async with agent(rollout, tools=[weather, clock]) as traveller:
        first = await traveller.run(QUESTION)
        second = await traveller.run("And now?", message_history=first.all_messages())
    assert second.output == "Nowhere."
    (record,) = rollout.judge(turns=4)
    assert record["text"].count("<think>") == 4


async def test_an_object_by_a_forced_call(rolling: Rolling) -> None:
    final = '[{"name":"final_result", "parameters":{"destination":"São Paulo","umbrellas":2}}]'
    rollout = rolling(*FORCED_CALLS, Words(final), family=QWEN2_5, results=RESULTS)
    async with agent(rollout, tools=[weather, clock], output_type=Trip) as traveller:
        result = await traveller.run(QUESTION)
    assert result.output == Trip(destination="São Paulo", umbrellas=2)
    assert bound_answers(rollout) == 3
    rollout.judge(turns=3)


async def test_an_object_by_a_schema(rolling: Rolling) -> None:
    rollout = rolling(Words('{"destination":"São Paulo",  "umbrellas":2}'), family=QWEN2_5)
    async with agent(rollout, output_type=NativeOutput(Trip)) as traveller:
        result = await traveller.run(QUESTION)
    assert result.output == Trip(destination="São Paulo", umbrellas=2)
    assert bound_answers(rollout) == 1
    rollout.judge(turns=1)
