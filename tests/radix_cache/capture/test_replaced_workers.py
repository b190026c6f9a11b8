"""Passthrough workers that take the place of SGLang engines while a generation is under way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plugged import until
from radix_cache.claims import PROMPT, STREAMED, ask, session_of
from radix_cache.outputs import events, output
from radix_cache.scripted import ScriptedEngine, routed
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

MINE, LAST = [5, 6], [7, 8]


@STREAMED
async def test_no_aborted_answer_goes_on_at_a_passthrough_worker(
    start: Start, engine: ScriptedEngine, checkpoint: str, streamed: bool
) -> None:
    """It may speak any protocol, and sample with any weights."""
    engine.delay = anyio.Event()
    engine.media_type = "text/event-stream" if streamed else "application/json"

    async def generate(_: Request) -> Response:
        going_on = output(client, LAST)
        content = events(going_on)[1] if streamed else orjson.dumps(going_on)
        return Response(content, media_type=engine.media_type)

    proxied = Starlette(routes=[Route("/generate", generate, methods=["POST"])])
    async with serving(proxied) as url, routed(start, engine, checkpoint, "--resume-aborted") as client:
        aborted = output(client, MINE)
        aborted["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
        told = events(aborted) if streamed else (200, orjson.dumps(aborted))
        pool = client.running.router.pool
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(ask, client, PROMPT, told, "a", streamed=streamed))
            await until(lambda: bool(engine.asked))
            (old,) = pool
            pool.remove(old)
            await client.running.client.post("/workers", json={"url": url, "worker_type": "passthrough"})
            await until(lambda: len(pool) == 1)
            engine.delay.set()
        (record,) = (await session_of(client, "a"))["trajectories"]
        assert (record["tokens"][-2:], record["finish_reason"]["type"]) == (MINE, "abort")
