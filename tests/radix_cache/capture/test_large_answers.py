"""The memory that a large answer costs while it passes; nothing of it stays."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from radix_cache.scripted import Client, ScriptedEngine
from router_core.exchange import Exchange
from router_core.reply import Reply
from routers import HEALTH
from slime_engine.tokenizer import EngineTokenizer
from slime_http.serving import serving
from slime_radix_cache.capture.recorder import StreamRecorder

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

MIB = 1 << 20
SIZE = 32 * MIB


def with_experts(text: str) -> bytes:
    """One token, and SIZE bytes of routed experts."""
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
        "routed_experts": "A" * SIZE,
    }
    return orjson.dumps({"text": text, "output_ids": [7], "meta_info": meta})


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_a_large_answer_is_in_memory_once(
    start: Start, tokenizer: EngineTokenizer, checkpoint: str
) -> None:
    """On the command's own event loop: asyncio's would copy what waits to be written."""
    answer = with_experts(tokenizer.decode([7]))

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(answer), MIB):
            yield answer[begin : begin + MIB]

    async def generate(_: Request) -> StreamingResponse:
        length = {"content-length": str(len(answer))}
        return StreamingResponse(pieces(), headers=length, media_type="application/json")

    worker = Starlette(routes=[Route("/generate", generate, methods=["POST"]), HEALTH])
    flags = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint)
    async with serving(worker) as url, start(*flags, "--worker-urls", url) as running:
        tracemalloc.start()
        try:
            for _ in range(3):
                before, _ = tracemalloc.get_traced_memory()
                tracemalloc.reset_peak()
                size = 0
                body = {"text": "a", "return_routed_experts": True}
                async with running.client.stream("POST", "/generate", json=body) as reply:
                    async for piece in reply.aiter_raw():
                        size += len(piece)
                after, peak = tracemalloc.get_traced_memory()
                assert size == len(answer)
                assert peak - before < 1.5 * SIZE
                assert after - before < 4 * MIB
        finally:
            tracemalloc.stop()
        stats = (await running.client.get("/cache_stats")).json()
        assert (stats["entries"], stats["unrecorded"]) == (4, {})  # a prompt, and a sample of each request


async def test_nothing_of_a_request_waits_for_the_garbage_collector(
    client: Client, engine: ScriptedEngine
) -> None:
    """Neither whole answers nor streams, nor those that are tried again or fail."""
    gc.collect()
    gc.disable()
    try:
        for turn in range(3):
            await client.generate(f"a{turn}", [7, 8, engine.eos], "s")
            await client.generate(f"b{turn}", [7, 8, 9], stream=False, rid=f"r{turn}")
            engine.script += [[7, 8, 9], (400, b'{"error":{"message":"no"}}')]
            body = {"text": f"c{turn}", "stream": True}
            assert (await client.running.client.post("/generate", json=body)).text.endswith("[DONE]\n\n")
            assert (await client.running.client.post("/generate", json={"text": "d"})).status_code == 400
        left = [one for one in gc.get_objects() if isinstance(one, Exchange | Reply | StreamRecorder)]
    finally:
        gc.enable()
    assert left == []
