"""langchain-openai: it drops thoughts, and writes arguments in its own way."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

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

# It keeps its connections, also those of models that are gone.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]

TOOLS = {each.name: each for each in (tool(weather), tool(clock))}


class Trip(BaseModel):
    """A trip's destination."""

    destination: str
    umbrellas: int


def chat(rollout: Rollout, **options: Any) -> Any:
    return ChatOpenAI(
        model="policy",
        base_url=rollout.base_url,
        api_key="none",
        default_headers=rollout.headers,
        stream_usage=True,
        **options,
    )


def asked() -> list[Any]:
    return [SystemMessage(SYSTEM), HumanMessage(QUESTION)]


def results(reply: Any) -> list[Any]:
    """The messages that answer the calls in ``reply``."""
    return [TOOLS[call["name"]].invoke(call) for call in reply.tool_calls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_with_tools(rollout: Rollout, stream: bool) -> None:
    messages = asked()
    model = chat(rollout).bind_tools([*TOOLS.values()])
    for _ in ANSWERS:
        reply = reduce(add, model.stream(messages)) if stream else model.invoke(messages)
        assert reply.usage_metadata["output_tokens"] == len(rollout.engine.journal()[-1].output_ids)
        messages += [reply, *results(reply)]
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


async def test_an_async_stream(rollout: Rollout) -> None:
    messages = asked()
    model = chat(rollout).bind_tools([*TOOLS.values()])
    for _ in ANSWERS:
        reply = reduce(add, [chunk async for chunk in model.astream(messages)])
        messages += [reply, *results(reply)]
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


def test_forced_calls(rolling: Rolling) -> None:
    rollout = rolling(*FORCED_CALLS, Words(LAST_WORDS), family=QWEN2_5, results=RESULTS)
    messages = asked()
    for choice in ("any", "clock", "none"):
        reply = chat(rollout).bind_tools([*TOOLS.values()], tool_choice=choice).invoke(messages)
        messages += [reply, *results(reply)]
    assert messages[-1].content == LAST_WORDS
    assert bound_answers(rollout) == 2
    rollout.judge(turns=3)


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_answers(rolling: Rolling, method: str) -> None:
    trip = '{ "destination" : "São Paulo","umbrellas":2}'
    said = f'[{{"name":"Trip", "parameters":{trip}}}]' if method == "function_calling" else trip
    rollout = rolling(Words(said), family=QWEN2_5)
    answer = chat(rollout).with_structured_output(Trip, method=method).invoke(QUESTION)
    assert answer == Trip(destination="São Paulo", umbrellas=2)
    assert bound_answers(rollout) == 1
    rollout.judge(turns=1)
