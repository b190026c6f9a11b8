"""``PUT /workers/{id}`` changes what a worker was registered with, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from core.servers import Wire, answer, scripted
from deadlines import until
from routers import BARE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from core.servers import Scripted
    from routers import Start

pytestmark = pytest.mark.anyio


async def polite(wire: Wire) -> None:
    while await wire.request():
        await wire.send(answer(b"done"))


@pytest.fixture
async def worker() -> AsyncIterator[Scripted]:
    async with scripted(polite) as server:
        yield server


async def test_only_named_members_change(start: Start, worker: Scripted) -> None:
    about: dict[str, Any] = {"url": worker.url, "labels": {"rack": "1", "zone": "a"}, "model_id": "m"}
    async with start(*BARE) as running:
        registered = (await running.client.post("/workers", json=about)).json()
        path = registered["location"]
        before = (await running.client.get(path)).json()
        change = {"labels": {"rack": "2"}, "priority": 5, "cost": 1.5, "bootstrap_port": 8998}
        changed = await running.client.put(path, json=change)
        assert changed.status_code == 202
        assert changed.json() == registered
        assert changed.headers["location"] == path
        labels = {"rack": "2", "zone": "a", "priority": "5", "cost": "1.5"}
        assert (await running.client.get(path)).json() == before | {"labels": labels, "bootstrap_port": 8998}
        assert (await running.client.put(path)).json() == registered  # nothing
        await running.client.put(f"/workers/{worker.url}", json={"model_id": "n"})
        assert (await running.client.get(path)).json()["model_id"] == "n"
        await running.client.put(path, json={"model_id": None})
        assert (await running.client.get(path)).json()["model_id"] is None


async def test_the_next_request_shows_the_new_key(start: Start, worker: Scripted) -> None:
    async with start(*BARE) as running:
        added = await running.client.post("/workers", json={"url": worker.url, "api_key": "old"})
        for key in ("old", "new"):
            await running.client.put(added.json()["location"], json={"api_key": key})
            assert (await running.client.post("/generate", json={})).content == b"done"
    shown = [request.values(b"authorization") for request in worker.arrived]
    assert shown == [[b"Bearer old"], [b"Bearer new"]]


async def test_priority_and_cost_of_a_registration_are_labels_too(start: Start, worker: Scripted) -> None:
    async with start(*BARE) as running:
        await running.client.post("/workers", json={"url": worker.url, "priority": 1, "cost": 2})
        [shown] = (await running.client.get("/workers")).json()["workers"]
    assert shown["labels"] == {"priority": "1", "cost": "2"}


async def test_fields_that_nothing_comes_of_are_named(start: Start, worker: Scripted) -> None:
    async with start(*BARE) as running:
        path = (await running.client.post("/workers", json={"url": worker.url})).json()["location"]
        changed = await running.client.put(path, json={"health_check_timeout_secs": 3, "labels": {"a": "b"}})
        assert (changed.status_code, changed.json()["warning"]) == (
            202,
            "not changed: health_check_timeout_secs",
        )
        assert (await running.client.get(path)).json()["labels"] == {"a": "b"}


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://127.0.0.1:1"},
        {"url": 1},
        {"worker_url": "http://127.0.0.1:1"},
        {"worker_url": 1},
        {"worker_type": "decode"},
        {"priority": -1},
        {"priority": 1.5},
        {"priority": True},
        {"cost": "cheap"},
        {"labels": {"a": 1}},
        {"bootstrap_port": 0},
        {"api_key": " key"},
        [],
    ],
    ids=str,
)
async def test_invalid_change_changes_nothing(start: Start, worker: Scripted, change: Any) -> None:
    async with start(*BARE) as running:
        path = (await running.client.post("/workers", json={"url": worker.url})).json()["location"]
        before = (await running.client.get(path)).json()
        sent = {**change, "model_id": "other"} if isinstance(change, dict) else change
        assert (await running.client.put(path, json=sent)).status_code == 400
        assert (await running.client.get(path)).json() == before


async def test_the_same_url_and_type_may_be_named(start: Start, worker: Scripted) -> None:
    async with start(*BARE) as running:
        path = (await running.client.post("/workers", json={"url": worker.url})).json()["location"]
        same = {"url": f"{worker.url}/", "worker_url": worker.url, "worker_type": "regular"}
        assert (await running.client.put(path, json=same)).status_code == 202


async def test_an_unknown_worker_is_a_404(start: Start) -> None:
    async with start(*BARE) as running:
        answered = await running.client.put("/workers/nobody", json={"priority": 1})
    assert (answered.status_code, answered.json()["code"]) == (404, "WORKER_NOT_FOUND")


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "/remove_worker?url={url}", "as POST /remove_worker asked"),
        ("DELETE", "/workers/{id}", "as DELETE /workers/ID asked"),
        ("DELETE", "/workers/{id}?drain=true", "its requests in flight have ended"),
    ],
)
async def test_the_log_says_what_removed_a_worker(
    start: Start, worker: Scripted, caplog: pytest.LogCaptureFixture, method: str, path: str, reason: str
) -> None:
    """It does not blame the failure of a worker that also was quarantined."""
    async with start(*BARE) as running:
        await running.client.post("/workers", json={"url": worker.url})
        (known,) = running.router.pool
        running.router.pool.hold(known, "health", "it cannot be reached", "quarantined")
        with caplog.at_level("INFO", "router_core.router"):
            await running.client.request(method, path.format(url=worker.url, id=known.id))
            await until(lambda: not len(running.router.pool))
    assert caplog.messages[-1] == f"worker {worker.url}: removed, {reason}"
