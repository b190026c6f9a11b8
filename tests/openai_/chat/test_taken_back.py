"""Events of a stream that take back what earlier ones told: the client has other tokens than the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from radix_cache.claims import PROMPT, session_of
from radix_cache.conftest import checkpoint, engine, tokenizer
from radix_cache.outputs import events, output, stream
from radix_cache.scripted import Client, ScriptedEngine, routed

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
        await expect_doubt(client)


async def expect_doubt(client: Client) -> None:
    """No record of session a is exact."""
    document = await session_of(client, "a")
    assert not document["complete"]
    verdicts = {(record["exact"], record["inexact_reason"]) for record in document["trajectories"]}
    assert verdicts == {(False, "engine_contradicts_itself")}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
async def test_tokens_that_a_generation_took_back_are_not_exact(
    start: Start, engine: ScriptedEngine, checkpoint: str, size: int, n: int
) -> None:
    """Of a cumulative stream only the first two events and the last are parsed; the others are compared as bytes."""
    async with routed(start, engine, checkpoint) as client:
        told = [output(client, [5, 6, 7, 8][:length]) for length in range(1, 5)]
        for one in told[:3]:
            one["meta_info"]["finish_reason"] = None
        told[size - 1]["output_ids"] = [*[5, 6, 7, 8][: size - 1], 88]
        told[size - 1]["meta_info"]["output_token_logprobs"][size - 1][1] = 88
        twins = [one | ({"index": index} if n > 1 else {}) for one in told for index in range(n)]
        await stream(client, "a", events(*twins), sampling_params={"n": n})
        await expect_doubt(client)


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
