"""The admin and control calls that slime sends to a router today work unchanged.

They are those of its ``SGLangEngine`` and ``http_utils``, for each version of the gateway that it knows (THUDM/slime,
``slime/backends/sglang_utils/sglang_engine.py`` and ``slime/utils/http_utils.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import pytest

from control.steered import Controlled, Steered, steering
from router_core.serving import serving

pytestmark = pytest.mark.anyio


async def insistent(client: httpx.AsyncClient, url: str, payload: Any, retries: int = 60) -> tuple[Any, int]:
    """As slime posts: everything from 400 on is repeated, sixty times. The answer, and the failures before it."""
    for failures in range(retries):
        try:
            answer = (await client.post(url, json=payload or {})).raise_for_status()
        except httpx.HTTPError:
            await anyio.sleep(0.02)
            continue
        try:
            return answer.json(), failures
        except ValueError:
            return answer.text, failures
    raise AssertionError(f"{url} failed {retries} times")


@pytest.fixture
async def late() -> AsyncIterator[Steered]:
    """A worker that nobody has registered."""
    worker = Steered()
    async with serving(worker.app) as worker.url:
        yield worker


async def registered(running: Controlled) -> list[str]:
    return list((await running.client.get("/list_workers")).raise_for_status().json()["urls"])


async def test_slime_with_its_own_router_or_an_old_gateway(late: Steered) -> None:
    async with steering() as running:
        added = await running.client.post(f"/add_worker?url={late.url}")
        assert added.raise_for_status().json() == {"status": "success", "worker_urls": {late.url: 0}}
        assert await registered(running) == [late.url]
        (await running.client.post(f"/remove_worker?url={late.url}")).raise_for_status()
        assert await registered(running) == []


async def test_slime_with_a_gateway_before_0_3(late: Steered) -> None:
    """It deletes by the quoted URL."""
    async with steering() as running:
        payload = {"url": late.url, "worker_type": "regular"}
        (await running.client.post("/workers", json=payload)).raise_for_status()
        (await running.client.delete(f"/workers/{quote(late.url, safe='')}")).raise_for_status()
        assert await registered(running) == []


async def test_slime_with_a_gateway_from_0_3_on(late: Steered) -> None:
    """It looks for its own URL in the list, and deletes by id."""
    async with steering() as running:
        prefill = {"url": late.url, "worker_type": "prefill", "bootstrap_port": 8998}
        accepted = await running.client.post("/workers", json=prefill)
        assert accepted.status_code == 202
        workers = (await running.client.get("/workers")).json()["workers"]
        (worker,) = [worker for worker in workers if worker["url"] == late.url]
        assert (worker["worker_type"], worker["bootstrap_port"]) == ("prefill", 8998)
        assert accepted.headers["location"] == f"/workers/{worker['id']}"
        (await running.client.delete(f"/workers/{worker['id']}")).raise_for_status()
        assert await registered(running) == []


async def test_the_insistent_client_gets_its_answer_when_a_worker_comes(late: Steered) -> None:
    async with steering() as running, anyio.create_task_group() as tasks:
        got: list[tuple[Any, int]] = []

        async def ask() -> None:
            got.append(await insistent(running.client, "/generate", {"text": "x"}))

        tasks.start_soon(ask)
        await anyio.sleep(0.1)
        assert got == []
        await running.client.post(f"/add_worker?url={late.url}")
        with anyio.fail_after(5):
            while not got:  # noqa: ASYNC110  # appended to by the task above
                await anyio.sleep(0.01)
        ((answer, failures),) = got
        assert answer["text"] == "said"
        assert failures > 0
        assert late.generated == 1


async def test_the_insistent_client_comes_through_a_pause_without_a_failure() -> None:
    worker = Steered()
    async with steering(worker) as running, anyio.create_task_group() as tasks:
        _, failures = await insistent(running.client, "/pause_generation", {"mode": "abort"})
        assert failures == 0
        got: list[tuple[Any, int]] = []

        async def ask() -> None:
            got.append(await insistent(running.client, "/generate", {"text": "x"}))

        tasks.start_soon(ask)
        await anyio.sleep(0.2)
        await insistent(running.client, "/continue_generation", None)
        with anyio.fail_after(5):
            while not got:  # noqa: ASYNC110  # appended to by the task above
                await anyio.sleep(0.01)
        assert [failures for _, failures in got] == [0]
        assert worker.generated == 1


async def test_slimes_control_calls_have_json_answers_and_a_status_that_it_understands() -> None:
    """``_make_request`` parses every answer; ``flush_cache`` polls by GET until it sees a 200."""
    one, two = Steered(), Steered()
    async with steering(one, two) as running:
        for path, payload in (
            ("/release_memory_occupation", {}),
            ("/resume_memory_occupation", {"tags": None}),
            ("/destroy_weights_update_group", {"group_name": "slime"}),
            ("/abort_request", {"abort_all": True}),
        ):
            answer = (await running.client.post(path, json=payload)).raise_for_status()
            assert answer.json()["success"] is True
        two.answers["/flush_cache"] = (400, b"Cache not flushed.")
        assert (await running.client.get("/flush_cache")).status_code != 200
        two.answers.clear()
        assert (await running.client.get("/flush_cache")).status_code == 200
