"""The admin and control calls that slime and miles send to a router today work unchanged.

They are those of slime's ``SGLangEngine`` and ``http_utils``, for each version of the gateway that it knows
(THUDM/slime, ``slime/backends/sglang_utils/sglang_engine.py`` and ``slime/utils/http_utils.py``), of both rollouts'
``abort``, and of miles' ``RouterWorkerClient``, which checks every answer (radixark/miles,
``miles/backends/sglang_utils/router_worker_client.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote
from uuid import UUID

import anyio
import httpx
import pytest

from control.steered import Controlled, Steered, steering
from deadlines import HANG_S
from ports import free_port
from slime_http.serving import serving

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


async def test_miles_waits_for_a_worker_to_be_there_and_to_be_gone(late: Steered) -> None:
    """Each answer is checked: status, identity, location; ids are UUIDs, spelt as ``uuid`` spells them."""
    async with steering() as running:
        client = running.client
        payload = {"url": late.url, "worker_type": "regular"}
        accepted = await client.post("/workers", json=payload)
        assert accepted.status_code == 202
        answer = accepted.json()
        worker_id = str(UUID(answer["worker_id"]))
        assert (answer["status"], answer["url"]) == ("accepted", late.url)
        assert answer["location"] == f"/workers/{worker_id}"

        with anyio.fail_after(HANG_S):
            while True:
                seen = await client.get(f"/workers/{worker_id}")
                assert seen.status_code == 200
                worker = seen.json()
                assert (worker["id"], worker["url"]) == (worker_id, late.url)
                assert worker.get("job_status") is None
                if worker["is_healthy"]:
                    break
                await anyio.sleep(0.01)

        # When the answer to the registration was lost, the id is looked up by URL.
        workers = (await client.get("/workers")).json()["workers"]
        assert [str(UUID(worker["id"])) for worker in workers if worker["url"] == late.url] == [worker_id]

        removed = await client.delete(f"/workers/{worker_id}")
        assert removed.status_code == 202
        assert (removed.json()["status"], removed.json()["worker_id"]) == ("accepted", worker_id)
        assert (await client.get(f"/workers/{worker_id}")).status_code == 404
        assert (await client.delete(f"/workers/{worker_id}")).status_code == 404


async def test_miles_is_told_at_once_what_cannot_work() -> None:
    """A status from 400 to 499, but for 408 and 429, ends its registration; anything else is tried again."""
    async with steering() as running:
        for payload in (
            {"url": "late:1", "worker_type": "regular"},
            {"url": "http://late:1", "worker_type": "odd"},
        ):
            assert (await running.client.post("/workers", json=payload)).status_code == 400


async def test_loading_worker_is_accepted_and_ready_when_it_answers(late: Steered) -> None:
    """Both register an engine when it is up; the gateway's own users may do so before."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with steering() as running:
        accepted = await running.client.post("/workers", json={"url": url})
        assert accepted.status_code == 202
        location = accepted.headers["location"]
        assert (await running.client.get(location)).json()["is_healthy"] is False
        async with serving(late.app, port=port):
            with anyio.fail_after(HANG_S):
                while not (await running.client.get(location)).json()["is_healthy"]:  # noqa: ASYNC110
                    await anyio.sleep(0.05)


async def test_rollouts_find_the_engines_that_they_abort(late: Steered) -> None:
    """By ``/list_workers`` of old routers, by ``/workers`` of new ones; then each engine is told directly."""
    async with steering() as running:
        await running.client.post("/workers", json={"url": late.url, "worker_type": "regular"})
        old = (await running.client.get("/list_workers")).json()["urls"]
        new = [worker["url"] for worker in (await running.client.get("/workers")).json()["workers"]]
        assert old == new == [late.url]
        for url in new:
            told = await running.client.post(f"{url}/abort_request", json={"abort_all": True})
            assert told.status_code == 200


async def test_the_insistent_client_gets_its_answer_when_a_worker_comes(late: Steered) -> None:
    async with steering() as running, anyio.create_task_group() as tasks:
        got: list[tuple[Any, int]] = []

        async def ask() -> None:
            got.append(await insistent(running.client, "/generate", {"text": "x"}))

        tasks.start_soon(ask)
        await anyio.sleep(0.1)
        assert got == []
        await running.client.post(f"/add_worker?url={late.url}")
        with anyio.fail_after(HANG_S):
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
        with anyio.fail_after(HANG_S):
            while not got:  # noqa: ASYNC110  # appended to by the task above
                await anyio.sleep(0.01)
        assert [failures for _, failures in got] == [0]
        assert worker.generated == 1


async def test_slimes_control_calls_get_json_and_a_status_it_understands() -> None:
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
