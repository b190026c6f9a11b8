"""The loop of docs/plugins/engine.md: an agent on OpenAI's SDK, a router, and an engine that says what a file says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

from openai import AsyncOpenAI

from routers import Start
from slime_testing import Running

pytestmark = pytest.mark.anyio

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
LOOP = (
    {
        "when": {"user": "umbrella"},
        "answer": {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
    },
    {"when": {"tool": "rain"}, "answer": "Take one."},
)


@asynccontextmanager
async def scripted(start: Start, path: Path) -> AsyncIterator[tuple[Running, AsyncOpenAI]]:
    (path / "loop.jsonl").write_text("\n".join(map(json.dumps, LOOP)))
    engine = ("--plugin", "engine", "--engine-script", str(path / "loop.jsonl"))
    async with (
        start(*engine, "--plugin", "radix_cache", "--plugin", "openai") as running,
        AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", default_headers={"X-Session-Id": "s"}
        ) as client,
    ):
        yield running, client


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_runs_its_tools_on_a_laptop(start: Start, tmp_path: Path, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Do I need an umbrella?"}]
    async with scripted(start, tmp_path) as (running, client):
        for _ in range(2):
            if streams:
                async with client.chat.completions.stream(
                    model="slime-ngram", messages=messages, tools=[TOOL]
                ) as stream:
                    answer: Any = await stream.get_final_completion()
            else:
                answer = await client.chat.completions.create(
                    model="slime-ngram", messages=messages, tools=[TOOL]
                )
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                assert json.loads(call.function.arguments) == {"city": "Oslo"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain all day"})
        (trajectory,) = (await running.client.get("/trajectories/s")).json()["trajectories"]
    assert messages[-1].content == "Take one."
    assert len(messages) == 4
    assert trajectory["exact"] is True
