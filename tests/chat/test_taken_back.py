"""Events of a stream that take back what earlier ones told: the client has other tokens than the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from radix_cache.claims import PROMPT
from radix_cache.conftest import checkpoint, engine, tokenizer
from radix_cache.scripted import ScriptedEngine, routed
from radix_cache.test_unrecorded_answers import events, output

if TYPE_CHECKING:
    from routers import Start

__all__ = ["checkpoint", "engine", "tokenizer"]

pytestmark = pytest.mark.anyio

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("lie", ["ids", "text"])
async def test_tokens_that_were_taken_back_are_not_exact(
    start: Start, engine: ScriptedEngine, checkpoint: str, path: str, lie: str
) -> None:
    """Only in the third event: no cumulative stream is read from end to end but for clients that ask for ids."""
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        told = [output(client, [5, 6, 7, 8][:size]) for size in range(1, 5)]
        for one in told[:3]:
            one["meta_info"]["finish_reason"] = None
        if lie == "ids":
            told[2]["output_ids"] = [5, 6, 9]
            told[2]["meta_info"]["output_token_logprobs"][2][1] = 9
        else:
            told[2]["text"] = told[1]["text"] + "no"
        engine.script.append(events(*told))
        engine.media_type = "text/event-stream"
        begin: dict[str, Any] = {"prompt": PROMPT} if "chat" not in path else {"messages": [HELLO]}
        body = {**begin, "stream": True, "return_token_ids": True, "session_id": "a"}
        answer = await client.running.client.post(path, json=body)
        lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
        last = orjson.loads(lines[-1])["choices"][0]
        assert (last["exact"], last["inexact_reason"]) == (False, "engine_contradicts_itself")


async def test_no_chat_goes_on_from_an_answer_that_was_taken_back(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        told = [output(client, [5, 6, 7, 8][:size]) for size in range(1, 5)]
        for one in told[:3]:
            one["meta_info"]["finish_reason"] = None
        told[2]["text"] = told[1]["text"] + "no"
        engine.script.append(events(*told))
        engine.media_type = "text/event-stream"
        body: dict[str, Any] = {"messages": [HELLO], "stream": True, "session_id": "a"}
        answer = await client.running.client.post("/v1/chat/completions", json=body)
        deltas = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        said = "".join(one["choices"][0]["delta"].get("content", "") for one in deltas)
        assert said != engine.tokenizer.decode([5, 6, 7, 8])
        engine.script.append([7])
        engine.media_type = "application/json"
        messages = [HELLO, {"role": "assistant", "content": said}, HELLO]
        body = {"messages": messages, "session_id": "a", "return_token_ids": True}
        answer = await client.running.client.post("/v1/chat/completions", json=body)
        assert answer.json()["history"] == "fresh"
