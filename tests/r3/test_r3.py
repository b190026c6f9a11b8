from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from routers import BARE, Start
from slime_http.serving import serving

EXPERTS = base64.b64encode(bytes(range(256)) * 64).decode()
# Spaces and a float spelt its own way: parsing and encoding again would not give these bytes back.
ANSWER = b'{ "text": "hi",  "meta_info": {"x": 1.50, "routed_experts": "%s"} }' % EXPERTS.encode()


class Worker:
    """Answers with routed experts, in odd but valid JSON, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.body())
        if b'"stream":true' in self.asked[-1]:
            return StreamingResponse(self.events(), media_type="text/event-stream")
        return Response(ANSWER, media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        yield b'data:  {"text": "h"}\n\n'
        yield b"data: " + ANSWER + b"\n\ndata: [DONE]\n\n"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
async def test_pitfall_26_the_worker_is_asked_for_routed_experts(start: Start, path: str) -> None:
    worker = Worker()
    async with (
        serving(worker.app) as url,
        start(*BARE, "--plugin", "r3", "--worker-urls", url) as running,
    ):
        await running.client.post(path, json={"text": "a", "unknown": {"kept": [1.5, None]}})
    assert orjson.loads(worker.asked[0]) == {
        "text": "a",
        "unknown": {"kept": [1.5, None]},
        "return_routed_experts": True,
    }


@pytest.mark.anyio
async def test_pitfall_27_the_answer_passes_byte_for_byte(start: Start) -> None:
    worker = Worker()
    async with (
        serving(worker.app) as url,
        start(*BARE, "--plugin", "r3", "--worker-urls", url) as running,
    ):
        whole = await running.client.post("/generate", json={"text": "a"})
        streamed = await running.client.post("/generate", json={"text": "a", "stream": True})
    assert whole.content == ANSWER
    assert streamed.content == b'data:  {"text": "h"}\n\ndata: ' + ANSWER + b"\n\ndata: [DONE]\n\n"


@pytest.mark.anyio
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
    worker = Worker()
    async with (
        serving(worker.app) as url,
        start(*BARE, "--plugin", "r3", "--worker-urls", url) as running,
    ):
        assert (await running.client.post(path, content=body)).status_code == 200
    assert worker.asked == [body]
