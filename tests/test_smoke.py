from __future__ import annotations

import pytest

from router_core.serving import serving
from router_core.types import Receive, Scope, Send
from routers import Start


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["raw_path"] + b"|" + body})


@pytest.mark.anyio
async def test_a_request_passes_through(start: Start) -> None:
    async with serving(_echo) as worker, start("--no-default-plugins", "--worker-urls", worker) as running:
        answer = await running.client.post("/some%20where", content=b"hello")
        assert answer.content == b"/some%20where|hello"
        assert [worker.in_flight for worker in running.router.pool] == [0]
