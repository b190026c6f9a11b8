"""``MODEL:ADAPTER`` in a chat, as SGLang's clients name the LoRA adapter that is to sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.claims import session_of, trained
from radix_cache.conftest import checkpoint, engine, tokenizer
from radix_cache.scripted import Client, ScriptedEngine, routed

if TYPE_CHECKING:
    from routers import Start

__all__ = ["checkpoint", "engine", "tokenizer"]

pytestmark = pytest.mark.anyio

HELLO = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HELLO]},
    "/v1/completions": {"prompt": "hello"},
}


async def asked(client: Client, path: str, **more: Any) -> Any:
    """Return the ``lora_path`` that the engine is asked for."""
    client.engine.script.append([5, 6])
    answer = await client.running.client.post(path, json={**BODIES[path], **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == more["model"]
    return client.engine.asked[-1].get("lora_path")


@pytest.mark.parametrize("path", BODIES)
async def test_the_adapter_that_the_model_names_samples(
    start: Start, engine: ScriptedEngine, checkpoint: str, path: str
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        (worker,) = client.running.router.pool
        worker.facts["model_id"] = "base"
        assert await asked(client, path, model="base:red") == "red"
        assert await asked(client, path, model="base:a:b", lora_path="a:b") == "a:b"
        assert await asked(client, path, model="base") is None
        assert await asked(client, path, model="base:") is None
        assert await asked(client, path, model="other:red") is None, "a name that nobody serves is any name"
        assert await asked(client, path, model="base", lora_path="blue") == "blue"
        body = {**BODIES[path], "model": "base:red", "lora_path": "blue"}
        answer = await client.running.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
        worker.facts["model_id"] = "base:red"
        assert await asked(client, path, model="base:red") is None


async def test_samples_of_another_adapter_are_no_samples_of_this_one(
    start: Start, engine: ScriptedEngine, checkpoint: str
) -> None:
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        (worker,) = client.running.router.pool
        worker.facts["model_id"] = "base"
        path, messages = "/v1/chat/completions", [HELLO]
        for ids, model in (([5, 6], "base:red"), ([7, 8], "base:blue")):
            engine.script.append(ids)
            body = {"messages": messages, "model": model, "session_id": "a"}
            answer = await client.running.client.post(path, json=body)
            messages = [*messages, answer.json()["choices"][0]["message"], HELLO]
        (record,) = (await session_of(client, "a"))["trajectories"]
        assert (record["exact"], trained(record)) == (True, [7, 8])
