"""A plugin limits the workers of a request, whoever chooses among them, and however often."""

from __future__ import annotations

import pytest

from holding import ready
from plugged import Recording, routing
from router_core import Exchange, Worker, hookimpl
from router_core.request import Request
from slime_policies.plugin import Policies
from slime_policies.round_robin import RoundRobin
from slime_retries import Settings
from slime_retries.plugin import Retries

pytestmark = pytest.mark.anyio


class Wanted:
    """Only the workers that the header ``x-rack`` names, if it is there."""

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        named = exchange.request.header(b"x-rack")
        if named is not None:
            exchange.worker_filter = lambda worker: worker.labels.get("rack") == named.decode()


async def test_policies_and_sessions_get_only_workers_of_the_filter() -> None:
    workers = [Recording(name) for name in "abc"]
    async with routing({"policies": Policies(RoundRobin()), "wanted": Wanted()}, *workers) as running:
        for worker, rack in zip(running.router.pool, ("1", "2", "2"), strict=True):
            worker.labels["rack"] = rack

        async def asked(rack: str | None, session: str | None = None) -> str:
            named = {"x-rack": rack, "x-session-id": session}
            headers = {name: value for name, value in named.items() if value is not None}
            return str((await running.client.post("/generate", headers=headers)).json()["worker"])

        assert {await asked(None) for _ in range(6)} == {"a", "b", "c"}
        assert {await asked("2") for _ in range(4)} == {"b", "c"}
        assert {await asked("1", "s") for _ in range(2)} == {"a"}
        moved = await asked("2", "s")
        assert moved in "bc"
        assert {await asked("2", "s") for _ in range(3)} == {moved}
        refused = await running.client.post("/generate", headers={"x-rack": "3"})
        assert refused.status_code == 503
        assert "eligible for this request's model or filter: http://" in refused.json()["error"]["message"]


async def test_failed_request_is_retried_only_at_workers_of_the_filter() -> None:
    """Also when that is the same worker, since no other one suits."""
    tried: list[Worker] = []

    class Broken:
        @hookimpl
        def select_worker(self, exchange: Exchange, workers: list[Worker]) -> Worker:
            tried.append(workers[0])
            return workers[0]

    settings = Settings(attempts=3, initial_backoff_ms=10, max_backoff_ms=10)
    plugins = {"broken": Broken(), "retries": Retries(settings), "wanted": Wanted()}
    async with routing(plugins, Recording("a")) as running:
        dead, _ = await running.router.add_worker("http://127.0.0.1:1", labels={"rack": "1"})
        ready(running.router.pool, dead)
        answer = await running.client.post("/generate", headers={"x-rack": "1"}, json={"text": "x"})
        assert answer.status_code == 502
        assert tried == [dead] * 3


def test_exchange_inherits_the_worker_filter_of_its_parent() -> None:
    with Exchange(Request("GET", b"/", [])) as parent:
        parent.worker_filter = lambda worker: worker.url == "http://a"
        with Exchange(Request("GET", b"/", []), parent=parent) as part:
            assert [part.may_go_to(Worker(url)) for url in ("http://a", "http://b")] == [True, False]
