"""Names that a client chooses and the cache keeps are short, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.scripted import ScriptedEngine, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

LONG = "a" * 1025


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/generate", {"rid": LONG}),
        ("PUT", "/generate", {"rid": LONG}),
        ("POST", "/generate", {"text": ["a", "b"], "rid": ["a", LONG]}),
        ("POST", "/abort_request", {"rid": LONG}),
    ],
)
async def test_a_rid_that_is_too_long_is_refused_without_the_plugin_control_too(
    start: Start, engine: ScriptedEngine, checkpoint: str, method: str, path: str, body: dict[str, Any]
) -> None:
    async with routed(start, engine, checkpoint) as client:
        answer = await client.running.client.request(method, path, json={"text": "a", **body})
    assert (answer.status_code, engine.asked) == (400, [])
    assert answer.json()["error"]["message"] == '"rid" has at most 1024 bytes, got 1025'
