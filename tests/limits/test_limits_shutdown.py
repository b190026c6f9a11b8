"""SIGTERM to a router process with requests in line."""

from __future__ import annotations

import asyncio

import anyio
import httpx
import pytest

from core.servers import Wire, answer, scripted
from deadlines import HANG_S, until
from limits.processes import router_process

pytestmark = pytest.mark.anyio

LIMIT = ("--plugin", "limits", "--max-concurrent-requests", "1", "--queue-size", "3")


async def test_sigterm_refuses_waiting_requests_and_answers_running_ones() -> None:
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
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=HANG_S) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask(name: str) -> None:
            answers[name] = await client.post("/generate", content=name)

        tasks.start_soon(ask, "served")
        await arrived.wait()
        for number in range(4):
            tasks.start_soon(ask, f"waiting {number}")
        await until(lambda: len(answers) == 1)  # the line is full: the last one of them is refused
        assert [each.status_code for each in answers.values()] == [429]
        answers.clear()
        router.terminate()
        await until(lambda: len(answers) == 3)
        said = {(each.status_code, each.json()["error"]["code"]) for each in answers.values()}
        assert said == {(503, "SHUTTING_DOWN")}
        go.set()
        assert await router.left() == 0
    assert answers["served"].text == "served"
