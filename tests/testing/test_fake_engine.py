"""The fake engine that authors of plugins test with, where its answers are not sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anyio.lowlevel import checkpoint
from starlette.responses import StreamingResponse

from slime_http.serving import serving
from slime_testing import Call, FakeEngine

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def asking(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield client


async def test_an_answer_may_be_a_status_or_a_response() -> None:
    engine = FakeEngine()
    engine.script += [(503, b"no"), StreamingResponse([b"a", b"b"], headers={"x-mine": "yes"})]
    async with asking(engine) as client:
        refused = await client.post("/generate", json={})
        streamed = await client.post("/generate", json={})
    assert (refused.status_code, refused.content) == (503, b"no")
    assert (streamed.headers["x-mine"], streamed.content) == ("yes", b"ab")


async def test_the_rest_of_the_answers_may_be_made_asynchronously() -> None:
    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        await checkpoint()
        return {"text": body["text"]}

    engine = FakeEngine()
    engine.rest = answer
    async with asking(engine) as client:
        assert (await client.post("/generate", json={"text": "a"})).json() == {"text": "a"}


async def test_other_paths_are_recorded_and_answered_as_a_test_says() -> None:
    async def other(call: Call) -> tuple[int, bytes]:
        return 201, b"%s %s" % (call.method.encode(), call.body)

    engine = FakeEngine()
    async with asking(engine) as client:
        assert (await client.get("/model_info")).json() == {}
        engine.answers["/model_info"] = 404, b""
        engine.other = other
        assert (await client.get("/model_info")).status_code == 404
        made = await client.put("/weights", content=b"7", headers={"x-mine": "yes"})
    assert (made.status_code, made.content) == (201, b"PUT 7")
    assert [(call.method, call.path, call.body) for call in engine.calls] == [
        ("GET", "/model_info", b""), ("GET", "/model_info", b""), ("PUT", "/weights", b"7"),
    ]  # fmt: skip
    assert engine.calls[-1].headers["x-mine"] == "yes"
