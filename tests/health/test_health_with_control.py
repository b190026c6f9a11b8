"""Health checks that never rest while the control plane updates weights: no worker is taken for what it is not."""

from __future__ import annotations

from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from control.steered import Controlled, Steered, steering
from health.patient import Changes, until
from own_time import OWN_TIME_UVLOOP, Backend
from plugged import routing
from slime_control import Control
from slime_control import Settings as ControlSettings
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings as EngineSettings
from slime_health import Health, Settings
from slime_http.serving import serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Backend:
    """As it serves. asyncio's own loop loses a connection that comes in the moment in which a server closes."""
    return OWN_TIME_UVLOOP


DISK = "/update_weights_from_disk"
QUICK = Settings(interval_s=0.02, timeout_s=1)


class Probed(Steered):
    """Its ``/health`` answers ``status``, or nothing until ``silent`` is over; control calls may wait for ``hold``."""

    def __init__(self, version: str = "7") -> None:
        super().__init__(version)
        self.status = 200
        self.silent: anyio.Event | None = None
        self.probes = 0

    async def _answer(self, request: Request) -> Response:
        if request.url.path == "/health":
            self.probes += 1
            if self.silent is not None:
                await self.silent.wait()
            return Response(status_code=self.status)
        return await super()._answer(request)

    async def blip(self) -> None:
        """A probe fails, the next ones do not."""
        before, self.status = self.probes, 503
        await until(lambda: self.probes > before)
        self.status = 200
        await self.rounds()

    async def rounds(self) -> None:
        """Some more probes."""
        before = self.probes
        await until(lambda: self.probes > before + 5)


def shown(running: Controlled) -> list[tuple[str, str | None]]:
    return [(worker.state, worker.weight_version) for worker in running.router.pool]


async def test_an_engine_that_has_its_update_before_the_others_is_left_in_use() -> None:
    quick, slow, changes = Probed(), Probed(), Changes()
    slow.hold = anyio.Event()
    beside = {"health": Health(QUICK), "changes": changes}
    async with steering(quick, slow, beside=beside) as running, anyio.create_task_group() as tasks:
        await quick.rounds()
        tasks.start_soon(lambda: running.client.post(DISK, json={"weight_version": "8"}))
        await until(lambda: quick.version == "8")
        await quick.rounds()
        await quick.blip()
        await slow.blip()  # and one that has not got it yet has the fleet's weights
        assert shown(running) == [("ready", "8"), ("ready", "7")]
        slow.hold.set()
        await until(lambda: running.router.weights.current == "8")
        await quick.rounds()
        await slow.rounds()
        assert shown(running) == [("ready", "8")] * 2
        assert changes.seen == []


async def test_engine_that_failed_an_update_stays_out_until_it_takes_one() -> None:
    good, bad, changes = Probed(), Probed(), Changes()
    beside = {"health": Health(QUICK), "changes": changes}
    async with steering(good, bad, beside=beside) as running:
        bad.answers[DISK] = (500, b"")
        assert (await running.client.post(DISK, json={"weight_version": "8"})).status_code == 207
        bad.version = "8"  # so it says, and half of it may be true
        await bad.rounds()
        assert shown(running) == [("ready", "8"), ("stale", None)]
        del bad.answers[DISK]
        assert (await running.client.post(DISK, json={"weight_version": "9"})).status_code == 200
        await good.rounds()
        await bad.rounds()
        assert shown(running) == [("ready", "9")] * 2
        assert changes.seen == ["stale", "readmitted"]


async def test_consecutive_updates_with_failures_between_hold_no_worker() -> None:
    workers, changes = [Probed("0") for _ in range(3)], Changes()
    beside = {
        "health": Health(Settings(interval_s=0.02, timeout_s=1, failure_threshold=1000)),
        "changes": changes,
    }
    async with steering(*workers, beside=beside) as running, anyio.create_task_group() as tasks:

        async def trip() -> None:
            while True:
                for worker in workers:
                    worker.status = 503
                    await anyio.sleep(0.03)
                    worker.status = 200

        tasks.start_soon(trip)
        for version in range(1, 40):
            answer = await running.client.post(DISK, json={"weight_version": str(version)})
            assert answer.status_code == 200
            await anyio.sleep(0.02)
            assert [state for state, _ in shown(running)] == ["ready"] * 3
        assert running.router.weights.current == "39"
        assert changes.seen == []
        tasks.cancel_scope.cancel()


async def test_engines_that_say_nothing_while_they_are_paused_are_not_dead() -> None:
    """SGLang's ``/health`` generates a token, which waits as any other does, and it answers 503 in the end."""
    one, other, changes = Probed(), Probed(), Changes()
    beside = {"health": Health(QUICK), "changes": changes}
    async with steering(one, other, beside=beside) as running:
        await running.client.post("/pause_generation", json={})
        one.status = other.status = 503
        await one.rounds()
        await other.rounds()
        assert changes.seen == []
        other.status = 200
        await running.client.post("/continue_generation", json={})
        await until(lambda: changes.seen == ["quarantined"])  # now it is no excuse any more
        await other.rounds()
        assert [state for state, _ in shown(running)] == ["quarantined", "ready"]


async def test_a_pause_that_failed_is_no_excuse() -> None:
    worker, changes = Probed(), Changes()
    worker.answers["/pause_generation"] = (500, b"")
    async with steering(worker, beside={"health": Health(QUICK), "changes": changes}) as running:
        assert (await running.client.post("/pause_generation", json={})).status_code == 502
        worker.status = 503
        await until(lambda: changes.seen == ["quarantined"])


async def test_engines_that_say_nothing_while_they_load_weights_are_not_dead() -> None:
    worker, changes = Probed(), Changes()
    worker.hold = anyio.Event()
    settings = Settings(interval_s=0.02, timeout_s=0.05)
    async with (
        steering(worker, beside={"health": Health(settings), "changes": changes}) as running,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: running.client.post(DISK, json={"weight_version": "8"}))
        await until(lambda: bool(worker.bodies(DISK)))
        worker.silent = anyio.Event()
        await worker.rounds()
        worker.hold.set()
        await until(lambda: running.router.weights.current == "8")
        assert changes.seen == []
        await until(lambda: changes.seen == ["quarantined"])  # the update is no excuse any more
        worker.silent.set()


async def test_an_engine_that_dies_while_it_is_paused_is_dead() -> None:
    changes = Changes()
    async with steering(Probed(), beside={"health": Health(QUICK), "changes": changes}) as running:
        async with serving(Probed().app, grace_s=0.1) as dies:
            await running.router.add_worker(dies)
            await running.client.post("/pause_generation", json={})
        await until(lambda: changes.seen == ["quarantined"])
        assert running.router.pool.find(dies).state == "quarantined"


async def test_engine_dead_during_an_update_returns_with_the_next_one() -> None:
    """Real engines: one dies, the other gets an update, the first comes back with the weights it begins with."""
    model, changes = load_model(), Changes()
    control = Control(ControlSettings(5.0, 5.0))
    plugins = {"health": Health(QUICK), "control": control, "changes": changes}

    def engine() -> Starlette:
        return make_app(EngineSettings(weight_version="1"), lambda: model)

    def update(version: str) -> dict[str, str]:
        return {"model_path": "/m", "weight_version": version}

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(routing(plugins))
        client, pool = running.client, running.router.pool
        stays = await stack.enter_async_context(serving(engine()))
        async with serving(engine(), grace_s=0.1) as dies:
            for url in (stays, dies):
                await running.router.add_worker(url)
            assert (await client.post(DISK, json=update("2"))).status_code == 200
        worker = pool.find(dies)
        await until(lambda: worker.state == "quarantined")
        assert (await client.post(DISK, json=update("3"))).status_code == 207
        assert running.router.weights.current == "3"
        port = urlsplit(dies).port or 0
        await stack.enter_async_context(serving(engine(), port=port))
        await until(lambda: worker.reason == "its weights are at version '1', the fleet's at '3'")
        assert (worker.state, worker.weight_version) == ("stale", "1")
        versions = set()
        for _ in range(10):
            body = {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}
            versions.add((await client.post("/generate", json=body)).json()["meta_info"]["weight_version"])
        assert versions == {"3"}
        assert (await client.post(DISK, json=update("4"))).status_code == 200
        await until(lambda: worker.state == "ready")
        await anyio.sleep(0.3)  # and some probes later
        assert [(each.state, each.weight_version) for each in pool] == [("ready", "4")] * 2
        # The control plane sets it aside as it does not reach it, which the next probe finds too.
        assert changes.seen[0] == "quarantined"
        assert changes.seen[-2:] == ["stale", "readmitted"]
