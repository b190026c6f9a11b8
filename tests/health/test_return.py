"""A worker comes back when it is well and has the fleet's weights; until then it is stale."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from health.patient import FAST, ONLY, Changes, Patient, serving_again, the_worker, until
from holding import quarantine, tear
from own_time import OWN_TIME_UVLOOP, Backend
from plugged import routing
from router_core import WeightUpdate, Worker, hookimpl
from routers import Start
from slime_health import Health, Settings
from slime_http.serving import serving
from slime_testing import Running

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Backend:
    """As it serves. asyncio's own loop loses a connection that comes in the moment in which a server closes."""
    return OWN_TIME_UVLOOP


QUICK = Settings(interval_s=0.02, timeout_s=1)


@asynccontextmanager
async def watched(
    patient: Patient, settings: Settings = QUICK
) -> AsyncIterator[tuple[Running, Changes, str]]:
    """A router that looks after ``patient``, what it has told of it, and where ``patient`` was; now it is dead."""
    changes = Changes()
    async with routing({"health": Health(settings), "changes": changes}) as running:
        async with serving(patient.app, grace_s=0.1) as url:
            await running.router.add_worker(url)
            await until(lambda: patient.probes > 2)
        await until(lambda: the_worker(running).state == "quarantined")
        yield running, changes, url


async def rounds(patient: Patient, count: int = 5) -> None:
    """Return after some more probes."""
    before = patient.probes
    await until(lambda: patient.probes > before + count)


def shown(worker: Worker) -> tuple[str, str | None, str | None]:
    return worker.state, worker.weight_version, worker.reason


async def test_a_worker_with_the_fleets_weights_is_used_again() -> None:
    patient = Patient("7")
    async with watched(patient) as (running, changes, url), serving_again(patient, url):
        await until(lambda: the_worker(running).state == "ready")
        assert shown(the_worker(running)) == ("ready", "7", None)
        assert changes.seen == ["quarantined", "readmitted"]
        assert (await running.client.get("/work")).text == "done"


async def test_a_worker_with_other_weights_is_stale_until_it_has_the_fleets() -> None:
    patient = Patient("7")
    async with watched(patient) as (running, changes, url):
        patient.version = "default"
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "stale")
            reason = "its weights are at version 'default', the fleet's at '7'"
            assert shown(the_worker(running)) == ("stale", "default", reason)
            await rounds(patient)
            assert (await running.client.get("/work")).status_code == 503
            patient.version = "7"  # somebody has updated it
            await until(lambda: the_worker(running).state == "ready")
            assert shown(the_worker(running)) == ("ready", "7", None)
            assert changes.seen == ["quarantined", "stale", "readmitted"]


@pytest.mark.slow
async def test_a_stale_worker_returns_when_the_fleet_moves_to_its_weights() -> None:
    """A trainer that updates the engines and then tells the router. The next probe would be due in a minute."""
    patient, other = Patient("8"), Patient("7")
    settings = Settings(interval_s=60, timeout_s=1)
    async with (
        serving(other.app) as first,
        serving(patient.app) as url,
        routing({"health": Health(settings)}) as running,
    ):
        await running.router.add_worker(first)
        worker, _ = await running.router.add_worker(url)
        quarantine(running.router.pool, worker, "a bad moment")
        await until(lambda: worker.state == "stale")
        assert worker.reason == "its weights are at version '8', the fleet's at '7'"
        await rounds(patient, 1)
        began = anyio.current_time()
        await running.client.post("/weight_version", json={"weight_version": "8"})
        await until(lambda: worker.state == "ready")
        assert anyio.current_time() - began < 2


class ToldVersions:
    """Versions that the fleet moved to."""

    def __init__(self) -> None:
        self.versions: list[str] = []

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self.versions.append(update.version)
        if update.version == "4":
            raise ValueError("a plugin that fails")


async def test_a_fleet_that_is_updated_past_the_router_is_followed() -> None:
    """As slime does: its trainer calls the engines, and tells nobody else."""
    one, two, told = Patient("default"), Patient("default"), ToldVersions()
    async with (
        serving(one.app) as first,
        serving(two.app) as second,
        routing({"health": Health(QUICK), "told": told}) as running,
    ):
        workers = [(await running.router.add_worker(url))[0] for url in (first, second)]
        for version in ("1", "2", "3", "4"):
            one.version = version
            await rounds(one)
            assert version not in told.versions, "one of them is ahead: the update has not come to all yet"
            two.version = version
            await until(lambda: running.router.weights.current == version)  # noqa: B023
        for version, bad in (("5", (two,)), ("6", (one, two))):
            for patient in bad:
                patient.status = 503
            await until(lambda: sum(each.state == "quarantined" for each in workers) == len(bad))  # noqa: B023
            for patient in (one, two):
                patient.status, patient.version = 200, version
            await until(lambda: all(each.state == "ready" for each in workers))
        two.version = "default"  # started anew, and nobody saw it
        await until(lambda: workers[1].state == "stale")
        await rounds(two)
        assert running.router.weights.current == "6"
        one.status = 503
        await until(lambda: workers[0].state == "quarantined")
        one.status, one.version = 200, "7"  # nobody in use says another version
        await until(lambda: workers[0].state == "ready")
        assert workers[1].state == "stale"
    assert told.versions == ["1", "2", "3", "4", "5", "6", "7"]


async def test_any_weights_will_do_if_the_operator_says_so() -> None:
    patient = Patient("7")
    settings = Settings(interval_s=0.02, timeout_s=1, readmit="any")
    async with watched(patient, settings) as (running, changes, url):
        patient.version = "default"
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "ready")
            assert shown(the_worker(running)) == ("ready", "default", None)
            assert changes.seen == ["quarantined", "readmitted"]


@pytest.mark.parametrize("readmit", ["matching", "any"])
async def test_a_torn_worker_does_not_return_by_what_it_says(readmit: str) -> None:
    patient, reason = Patient("7"), "a control call failed there"
    settings = Settings(interval_s=0.02, timeout_s=1, readmit=readmit)  # type: ignore[arg-type]  # one of the two
    async with watched(patient, settings) as (running, changes, url):
        worker = the_worker(running)
        running.router.pool.hold(worker, "control", reason, "stale")
        worker.weight_version = None
        async with serving_again(patient, url):
            await until(lambda: worker.state == "stale")
            await rounds(patient)
            assert shown(worker) == ("stale", None, reason)
            await running.client.post("/add_worker", json={"url": url})
            assert shown(worker) == ("ready", "7", None)
            await rounds(patient)
            assert shown(worker) == ("ready", "7", None)
            assert changes.seen == ["quarantined", "stale"]


async def test_the_reason_for_which_a_torn_worker_was_set_aside_stays() -> None:
    patient = Patient("7")
    async with serving(patient.app) as url, routing({"health": Health(QUICK)}) as running:
        worker, _ = await running.router.add_worker(url)
        tear(running.router.pool, worker, "it failed an update")
        await rounds(patient)
        assert (worker.state, worker.reason) == ("stale", "it failed an update")


async def test_registering_a_stale_worker_says_that_its_weights_are_right() -> None:
    patient = Patient("7")
    async with watched(patient) as (running, _, url):
        patient.version = "default"
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "stale")
            await running.client.post("/add_worker", json={"url": url})
            assert the_worker(running).state == "ready"
            await rounds(patient)
            assert shown(the_worker(running)) == ("ready", "default", None)


async def test_worker_without_version_returns_only_to_fleet_without_versions() -> None:
    patient = Patient()
    async with watched(patient) as (running, changes, url):
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "ready")
        await until(lambda: the_worker(running).state == "quarantined")
        await running.client.post("/weight_version", json={"weight_version": "7"})
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "stale")
            assert "does not say which weights it has" in (the_worker(running).reason or "")
            assert the_worker(running).weight_version is None  # "7" was said of the process before
        await until(lambda: the_worker(running).state == "quarantined")
        assert changes.seen == ["quarantined", "readmitted", "quarantined", "stale", "quarantined"]


async def test_a_fleet_that_knew_no_version_learns_it_from_who_returns() -> None:
    patient = Patient()
    async with watched(patient) as (running, _, url):
        patient.version = "7"
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "ready")
            assert (await running.client.get("/weight_version")).json() == {
                "weight_version": "7",
                "workers": {url: "7"},
            }


async def test_a_worker_that_cannot_say_who_it_is_has_not_passed(start: Start) -> None:
    patient = Patient("7")
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.info_status = 500
        await until(lambda: the_worker(running).state == "quarantined")
        assert the_worker(running).reason == "it answered /model_info with 500"


async def test_an_old_engine_is_asked_by_the_old_name() -> None:
    patient = Patient("7")
    patient.old = True
    async with watched(patient) as (running, _, url):
        patient.version = "default"
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "stale")
            assert the_worker(running).weight_version == "default"


# workers that nobody saw fail


async def test_replaced_process_is_noticed_by_its_old_weights() -> None:
    patient, changes = Patient("default"), Changes()
    async with serving(patient.app) as url, routing({"health": Health(QUICK), "changes": changes}) as running:
        worker, _ = await running.router.add_worker(url)
        patient.version = "7"
        await running.client.post("/weight_version", json={"weight_version": "7"})
        await rounds(patient)
        assert shown(worker) == ("ready", "7", None)
        patient.version = "default"
        await until(lambda: worker.state == "stale")
        assert shown(worker)[1:] == ("default", "its weights are at version 'default', the fleet's at '7'")
        assert changes.seen == ["stale"]


async def test_a_process_that_was_replaced_soon_after_an_update_is_noticed_too() -> None:
    """It says what the one before it had said to the last probe, long ago: each update is looked at soon."""
    patient = Patient("default")
    settings = Settings(interval_s=1.5, timeout_s=1)
    async with serving(patient.app) as url, routing({"health": Health(settings)}) as running:
        worker, _ = await running.router.add_worker(url)
        await rounds(patient, 0)
        patient.version = "7"
        await running.client.post("/weight_version", json={"weight_version": "7"})
        await anyio.sleep(1.1)
        patient.version = "default"
        await until(lambda: worker.state == "stale")


@pytest.mark.slow
async def test_one_failed_request_makes_health_check_the_weights_first(
    start: Start,
) -> None:
    """The process was replaced so fast that nothing but one request noticed, by one whose version is not news."""
    patient = Patient("default")
    async with start(*ONLY, "--health-check-interval-secs", "1") as running:
        async with serving(patient.app, grace_s=0.1) as url:
            await running.client.post("/add_worker", json={"url": url})
            await until(lambda: patient.probes > 1)
            await running.client.post("/weight_version", json={"weight_version": "7"})
            await rounds(patient, 1)
            assert the_worker(running).state == "ready"  # it has always said so
        assert (await running.client.get("/work")).status_code == 502
        async with serving_again(patient, url):
            await until(lambda: the_worker(running).state == "stale")
            assert the_worker(running).weight_version == "default"


async def test_weights_ahead_of_the_fleets_are_an_update_under_way() -> None:
    patient, changes = Patient("7"), Changes()
    async with serving(patient.app) as url, routing({"health": Health(QUICK), "changes": changes}) as running:
        worker, _ = await running.router.add_worker(url)
        await rounds(patient)
        patient.version = "8"
        await rounds(patient)
        assert shown(worker) == ("ready", "8", None)
        patient.status = 503  # and one bad moment changes nothing
        await rounds(patient, 0)
        patient.status = 200
        await rounds(patient)
        assert shown(worker) == ("ready", "8", None)
        await running.client.post("/weight_version", json={"weight_version": "8"})
        await rounds(patient)
        assert changes.seen == []


async def test_an_answer_that_was_overtaken_by_an_update_is_not_believed() -> None:
    """The engine says 7, gets 8, 8 is announced; and only then the router reads that it has 7."""
    patient, changes = Patient("7"), Changes()
    async with serving(patient.app) as url, routing({"health": Health(QUICK), "changes": changes}) as running:
        worker, _ = await running.router.add_worker(url)
        await rounds(patient)
        patient.info_hold = anyio.Event()
        patient.status = 503  # so that what it has matters
        await rounds(patient, 0)
        patient.status, patient.info_held = 200, False
        await until(lambda: patient.info_held)
        hold, patient.info_hold, patient.version = patient.info_hold, None, "8"
        await running.client.post("/weight_version", json={"weight_version": "8"})
        hold.set()
        await rounds(patient)
        assert shown(worker) == ("ready", "8", None)
        assert changes.seen == []


async def test_engines_with_a_constant_version_are_not_held_as_stale() -> None:
    patient, changes = Patient("default"), Changes()
    async with serving(patient.app) as url, routing({"health": Health(QUICK), "changes": changes}) as running:
        worker, _ = await running.router.add_worker(url)
        await rounds(patient)
        for version in ("1", "2"):
            await running.client.post("/weight_version", json={"weight_version": version})
            await rounds(patient)
            assert shown(worker) == ("ready", version, None)
        assert changes.seen == []
