"""SIGTERM to a router process with requests in line."""

from __future__ import annotations

import asyncio

import anyio
import httpx
import pytest

from core.servers import Wire, answer, scripted
from limits.processes import router_process

pytestmark = pytest.mark.anyio

LIMIT = ("--plugin", "limits", "--max-concurrent-requests", "1", "--queue-timeout-secs", "30")


async def test_at_sigterm_who_waits_is_told_at_once_and_who_is_served_is_answered() -> None:
    arrived, go = asyncio.Event(), asyncio.Event()
    answers: dict[str, httpx.Response] = {}

    async def worker(wire: Wire) -> None:
        while request := await wire.request():
            arrived.set()
            await go.wait()
            await wire.send(answer(request.body))

    async with (
        scripted(worker) as served,
        router_process(*LIMIT, "--worker-urls", served.url) as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=20) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask(name: str) -> None:
            answers[name] = await client.post("/generate", content=name)

        tasks.start_soon(ask, "served")
        await arrived.wait()
        for number in range(3):
            tasks.start_soon(ask, f"waiting {number}")
        await anyio.sleep(0.3)  # they are in line; their answers say so
        router.terminate()
        with anyio.fail_after(5):
            while len(answers) < 3:  # noqa: ASYNC110  # what is told is seen
                await anyio.sleep(0.01)
        assert {name: (each.status_code, each.json()["error"]["code"]) for name, each in answers.items()} == {
            f"waiting {number}": (503, "SHUTTING_DOWN") for number in range(3)
        }
        go.set()
        assert await router.left() == 0
    assert answers["served"].text == "served"
