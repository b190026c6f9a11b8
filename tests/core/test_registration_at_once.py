"""Hundreds of workers that register in one moment are all ready soon, and the router goes on meanwhile."""

from __future__ import annotations

from urllib.parse import urlsplit

import anyio
import pytest

from plugged import until
from router_core.registration import _ASKED_AT_ONCE
from router_core.types import Receive, Scope, Send
from routers import Start
from slime_http.serving import serving

pytestmark = pytest.mark.anyio


class ManyServers:
    """A server at every address of this machine; ``most`` is the highest number of concurrent requests."""

    def __init__(self) -> None:
        self.asking = self.most = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] == "lifespan.startup":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.asking += 1
        self.most = max(self.most, self.asking)
        await anyio.sleep(0.01)
        self.asking -= 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


async def test_a_fleet_that_registers_at_once_is_asked_a_few_at_a_time(start: Start) -> None:
    fleet = ManyServers()
    flags = ("--disable-health-check", "--worker-startup-check-interval", "0.05")
    async with serving(fleet, host="0.0.0.0") as url, start(*flags) as running:
        port = urlsplit(url).port
        async with anyio.create_task_group() as tasks:
            for number in range(250):
                tasks.start_soon(running.router.add_worker, f"http://127.1.0.{number + 1}:{port}")
        await until(lambda: all(worker.state == "ready" for worker in running.router.pool))
        assert len(running.router.pool) == 250
        assert fleet.most <= _ASKED_AT_ONCE
