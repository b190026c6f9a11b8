"""Passthrough workers that take the place of SGLang engines while a generation is under way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import orjson
import pytest

from plugged import until
from radix_cache.claims import PROMPT, STREAMED, ask, session_of
from radix_cache.outputs import events, output
from radix_cache.scripted import ScriptedEngine, routed
from slime_http.serving import serving
from slime_testing import FakeEngine

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
    passthrough = FakeEngine()
    async with (
        serving(passthrough.app) as url,
        routed(start, engine, checkpoint, "--resume-aborted") as client,
    ):
        passthrough.rest = lambda _: output(client, LAST)
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
