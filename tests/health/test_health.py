from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core.cli import main
from router_core.serving import serving
from routers import Running, Start

FAST = ("--health-check-interval-secs", "0.02", "--health-check-timeout-secs", "0.2")


class Patient:
    """A worker whose health can be set; ``hung`` probes wait until it is let go."""

    def __init__(self) -> None:
        self.status = 200
        self.probes = 0
        self.hang = False
        self.released = anyio.Event()
        self.app = Starlette(routes=[Route("/health", self.health), Route("/work", self.work)])

    async def health(self, _: Request) -> Response:
        self.probes += 1
        if self.hang:
            await self.released.wait()
        return Response(status_code=self.status)

    async def work(self, _: Request) -> Response:
        return Response("done")


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110  # the state belongs to the code under test
            await anyio.sleep(0.005)


def state(running: Running) -> str:
    (worker,) = running.router.pool
    return worker.state


@pytest.mark.anyio
async def test_a_failing_worker_is_quarantined_after_three_probes_and_returns_on_success(
    start: Start,
) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        assert (await running.client.get("/work")).text == "done"
        patient.status, before = 503, patient.probes
        await until(lambda: state(running) == "quarantined")
        assert patient.probes >= before + 3
        refused = await running.client.get("/work")
        assert refused.status_code == 503
        assert "quarantined" in refused.json()["error"]["message"]
        assert (await running.client.get("/health")).json()["healthy_workers"] == 0
        assert (await running.client.get("/readiness")).status_code == 503
        patient.status = 200
        await until(lambda: state(running) == "ready")
        assert (await running.client.get("/work")).text == "done"


@pytest.mark.anyio
async def test_two_failures_are_forgiven(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST, "--health-failure-threshold", "1000") as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status, before = 503, patient.probes
        await until(lambda: patient.probes > before + 5)
        assert state(running) == "ready"


@pytest.mark.anyio
async def test_a_worker_that_hangs_is_quarantined_by_the_deadline(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.hang = True
        await until(lambda: state(running) == "quarantined")
        patient.hang = False
        patient.released.set()
        await until(lambda: state(running) == "ready")


@pytest.mark.anyio
async def test_registering_a_quarantined_worker_again_gives_it_a_fresh_start(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status = 503
        await until(lambda: state(running) == "quarantined")
        patient.status = 200
        await running.client.post("/add_worker", json={"url": url})
        assert state(running) == "ready"


@pytest.mark.anyio
async def test_pitfall_20_probes_do_not_share_the_connections_of_traffic(start: Start) -> None:
    patient = Patient()
    released = anyio.Event()

    async def slow(_: Request) -> Response:
        await released.wait()
        return Response("late")

    patient.app.router.routes.append(Route("/slow", slow))
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(running.client.get, "/slow")
            await until(lambda: sum(worker.in_flight for worker in running.router.pool) >= 100)
            before = patient.probes
            await until(lambda: patient.probes > before + 5)
            assert state(running) == "ready"
            released.set()


@pytest.mark.anyio
async def test_a_removed_worker_is_not_probed_any_more(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        await until(lambda: patient.probes > 1)
        await running.client.post("/remove_worker", json={"url": url})
        await anyio.sleep(0.1)  # a probe that is on its way may still arrive
        before = patient.probes
        await anyio.sleep(0.2)
        assert patient.probes == before


@pytest.mark.anyio
async def test_probing_can_be_disabled(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST, "--disable-health-check") as running:
        await running.client.post("/add_worker", json={"url": url})
        await anyio.sleep(0.2)
        assert patient.probes == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--health-check-interval-secs", "0"),
        ("--health-check-timeout-secs", "-1"),
        ("--health-failure-threshold", "0"),
        ("--health-check-endpoint", "health"),
    ],
)
def test_bad_values_are_refused_by_name(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, value]) == 2
    assert flag in capsys.readouterr().err
