from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest
from starlette.responses import StreamingResponse
from starlette.routing import Route

from plugged import Recording
from router_core.types import ASGIApp
from routers import BARE, Start
from slime_http.serving import serving
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio

EXPERTS = base64.b64encode(bytes(range(256)) * 64).decode()
# Spaces and a float spelt its own way: parsing and encoding again would not give these bytes back.
ANSWER = b'{ "text": "hi",  "meta_info": {"x": 1.50, "routed_experts": "%s"} }' % EXPERTS.encode()
EVENTS = [b'data:  {"text": "h"}\n\n', b"data: %b\n\ndata: [DONE]\n\n" % ANSWER]


@asynccontextmanager
async def routing_experts(start: Start, worker: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(worker) as url, start(*BARE, "--plugin", "r3", "--worker-urls", url) as running:
        yield running.client


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("PUT", "/generate"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
    ],
)
async def test_pitfall_26_the_worker_is_asked_for_routed_experts(
    start: Start, method: str, path: str
) -> None:
    worker = Recording()
    async with routing_experts(start, worker) as client:
        await client.request(method, path, json={"text": "a", "unknown": {"kept": [1.5, None]}})
    assert orjson.loads(worker.requests[0][2]) == {
        "text": "a",
        "unknown": {"kept": [1.5, None]},
        "return_routed_experts": True,
    }


async def test_pitfall_27_the_answer_passes_byte_for_byte(start: Start) -> None:
    engine = FakeEngine()
    engine.script.append((200, ANSWER))
    async with routing_experts(start, engine.app) as client:
        whole = await client.post("/generate", json={"text": "a"})
        stream = Route("/generate", lambda _: StreamingResponse(iter(EVENTS)), methods=["POST"])
        engine.app.routes.insert(0, stream)
        streamed = await client.post("/generate", json={"text": "a", "stream": True})
    assert whole.content == ANSWER
    assert streamed.content == b"".join(EVENTS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text": "a",  "return_routed_experts": false}'),
        ("/generate", b'["not", "an object"]'),
        ("/generate", b"not JSON"),
        ("/flush_cache", b'{"text":  "a"}'),
    ],
)
async def test_unrelated_requests_pass_unchanged(start: Start, path: str, body: bytes) -> None:
    worker = Recording()
    async with routing_experts(start, worker) as client:
        assert (await client.post(path, content=body)).status_code == 200
    assert worker.bodies == [body]
