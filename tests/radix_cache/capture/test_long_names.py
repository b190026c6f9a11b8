"""Names that a client chooses and the cache keeps are short, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.scripted import Client, ScriptedEngine, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: Longer than any name that is kept.
LONG = "a" * 1025


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/generate", {"rid": LONG}),
        ("PUT", "/generate", {"rid": LONG}),
        ("POST", "/generate", {"text": ["a", "b"], "rid": ["a", LONG]}),
    ],
)
async def test_a_rid_that_is_too_long_is_refused_without_the_plugin_control_too(
    start: Start, engine: ScriptedEngine, checkpoint: str, method: str, path: str, body: dict[str, Any]
) -> None:
    async with routed(start, engine, checkpoint) as client:
        answer = await client.running.client.request(method, path, json={"text": "a", **body})
    assert (answer.status_code, engine.asked) == (400, [])
    assert answer.json()["error"]["message"] == '"rid" has at most 1024 bytes, got 1025'


@pytest.mark.parametrize("path", [LONG, ["a", LONG]])
async def test_the_name_of_an_adapter_that_is_too_long_is_refused(
    start: Start, engine: ScriptedEngine, checkpoint: str, path: object
) -> None:
    async with routed(start, engine, checkpoint) as client:
        answer = await client.running.client.post("/generate", json={"text": ["a", "b"], "lora_path": path})
    assert (answer.status_code, engine.asked) == (400, [])
    assert answer.json()["error"]["message"] == '"lora_path" has at most 1024 bytes, got 1025'


async def test_of_an_unknown_field_the_beginning_of_its_name_is_kept(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.script.append([5, 6])
    body = {"text": "hi", "session_id": "s", LONG: 1}
    assert (await client.running.client.post("/generate", json=body)).status_code == 200
    [record] = await client.records("s")
    assert record["inexact_reason"] == "unknown_field:" + "a" * 64
