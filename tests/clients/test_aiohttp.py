"""aiohttp: no SDK, but strict about headers."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp import ClientResponse, ClientSession

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, SYSTEM, TOOLS, Rollout, call

pytestmark = pytest.mark.anyio


async def whole(answer: ClientResponse) -> dict[str, Any]:
    """The message of an answer."""
    message: dict[str, Any] = (await answer.json())["choices"][0]["message"]
    return message


async def streamed(answer: ClientResponse) -> dict[str, Any]:
    """The same of a stream, put together."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    lines = [line async for line in answer.content]
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
    for line in lines[:-2:2]:
        (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                message["tool_calls"].append(piece)
            else:
                begun = message["tool_calls"][piece["index"]]["function"]
                begun["arguments"] += piece["function"]["arguments"]
    return message


@pytest.mark.parametrize("read", [whole, streamed])
async def test_a_conversation_with_tools(rollout: Rollout, read: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with ClientSession(headers=rollout.headers) as client:
        for _ in ANSWERS:
            body = {"messages": messages, "tools": TOOLS, "stream": read is streamed}
            async with client.post(f"{rollout.base_url}/chat/completions", json=body) as answer:
                assert answer.status == 200
                assert len(answer.headers) == len(set(answer.headers))  # it refuses some that come twice
                message = await read(answer)
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": each["id"], "content": call(**each["function"])}
                for each in message.get("tool_calls", ())
            ]
    assert messages[-1]["content"] == LAST_WORDS
    rollout.judge(turns=3)
