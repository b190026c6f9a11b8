"""Probes: quarantine, return, and what many workers cost."""

from __future__ import annotations

import logging
import os
from contextlib import AsyncExitStack

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from health.patient import FAST, Changes, Patient, the_worker, until
from plugged import routing
from router_core import Exchange
from router_core.cli import main
from router_core.request import Request as RouterRequest
from routers import Start
from slime_health import Health, Settings
from slime_http.serving import serving

pytestmark = pytest.mark.anyio


async def test_failing_worker_is_quarantined_after_three_probes_and_returns(
    start: Start,
) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        assert (await running.client.get("/work")).text == "done"
        patient.status, before = 503, patient.probes
        await until(lambda: the_worker(running).state == "quarantined")
        assert patient.probes >= before + 3
        refused = await running.client.get("/work")
        assert refused.status_code == 503
        assert "quarantined" in refused.json()["error"]["message"]
        assert (await running.client.get("/health")).json()["healthy_workers"] == 0
        assert (await running.client.get("/readiness")).status_code == 503
        (shown,) = (await running.client.get("/workers")).json()["workers"]
        assert (shown["state"], shown["reason"]) == ("quarantined", "it answered /health with 503")
        patient.status = 200
        await until(lambda: the_worker(running).state == "ready")
        assert the_worker(running).reason is None
        assert (await running.client.get("/work")).text == "done"


async def test_failures_below_the_threshold_are_forgiven(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST, "--health-failure-threshold", "1000") as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status, before = 503, patient.probes
        await until(lambda: patient.probes > before + 5)
        assert the_worker(running).state == "ready"


async def test_a_worker_that_hangs_is_quarantined_by_the_deadline(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.hang = True
        await until(lambda: the_worker(running).state == "quarantined")
        assert the_worker(running).reason == "no answer to /health within 0.2 s"
        patient.hang = False
        patient.released.set()
        await until(lambda: the_worker(running).state == "ready")


async def test_worker_returns_after_the_configured_number_of_good_probes(start: Start) -> None:
    patient = Patient()
    threshold = ("--health-success-threshold", "4")
    async with serving(patient.app) as url, start(*FAST, *threshold) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status = 503
        await until(lambda: the_worker(running).state == "quarantined")
        patient.status, before = 200, patient.probes
        await until(lambda: the_worker(running).state == "ready")
        assert patient.probes >= before + 4


async def test_registering_a_quarantined_worker_again_gives_it_a_fresh_start(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status = 503
        await until(lambda: the_worker(running).state == "quarantined")
        patient.status = 200
        await running.client.post("/add_worker", json={"url": url})
        assert the_worker(running).state == "ready"


async def test_pitfall_14_dead_worker_registered_again_is_probed_anew(
    start: Start,
) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST, "--health-failure-threshold", "20") as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status = 503
        await until(lambda: the_worker(running).state == "quarantined")
        before = patient.probes
        await running.client.post("/add_worker", json={"url": url})
        assert the_worker(running).state == "ready"  # it answers what it is, so it is given the chance
        await until(lambda: the_worker(running).state == "quarantined")
        assert patient.probes >= before + 19  # a probe that began before counts for nothing


async def test_pitfall_20_probes_do_not_share_the_connections_of_traffic(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(running.client.get, "/late")
            await until(lambda: sum(worker.in_flight for worker in running.router.pool) >= 100)
            before = patient.probes
            await until(lambda: patient.probes > before + 5)
            assert the_worker(running).state == "ready"
            patient.released.set()


async def test_a_probe_that_hangs_holds_back_nobody_elses(start: Start) -> None:
    hanging, well = [Patient() for _ in range(8)], Patient()
    for each in hanging:
        each.hang = True
    flags = ("--health-check-interval-secs", "0.02", "--health-check-timeout-secs", "20")
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(each.app, grace_s=0.1)) for each in (*hanging, well)]
        running = await stack.enter_async_context(start(*flags))
        for url in urls:
            await running.client.post("/add_worker", json={"url": url})
        await until(lambda: all(each.probes for each in hanging))
        before = well.probes
        await until(lambda: well.probes > before + 10)
        assert [each.probes for each in hanging] == [1] * 8  # and none piles up on who hangs
        for each in hanging:
            each.released.set()


async def test_a_worker_with_a_key_is_asked_with_it_and_no_other_one_is(start: Start) -> None:
    keyed, plain = Patient("7"), Patient("7")
    async with serving(keyed.app) as keyed_url, serving(plain.app) as url, start(*FAST) as running:
        await running.client.post("/workers", json={"url": keyed_url, "api_key": "sesame"})
        await running.client.post("/workers", json={"url": url})
        for each in (keyed, plain):
            each.headers.clear()
            await until(lambda each=each: len(each.headers) > 4)  # type: ignore[misc]  # bound here
        assert {each.get("authorization") for each in keyed.headers} == {"Bearer sesame"}
        assert {each.get("authorization") for each in plain.headers} == {None}


async def test_many_workers_are_not_probed_in_step() -> None:
    """However many are due at once: two looks never begin within the same 5 ms."""
    began: list[float] = []

    async def health(_: Request) -> Response:
        began.append(anyio.current_time())
        return Response(status_code=503)

    health_checks = Health(Settings(interval_s=0.01, timeout_s=5, failure_threshold=1_000_000))
    worker = Patient()
    worker.app.router.routes.insert(0, Route("/health", health))
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker.app, grace_s=0.1)) for _ in range(20)]
        running = await stack.enter_async_context(routing({"health": health_checks}))
        for url in urls:
            await running.router.add_worker(url)
        began.clear()
        await anyio.sleep(1)  # 20 workers, each of them due every 10 ms: 2,000 looks, if nobody counted
        assert 20 < len(began) <= 1.1 / 0.005


async def test_a_removed_worker_is_not_probed_any_more_and_leaves_nothing_behind() -> None:
    patient, health = Patient(), Health(Settings(interval_s=0.02, timeout_s=5))
    async with serving(patient.app) as url, routing({"health": health}) as running:
        for _ in range(3):
            await running.router.add_worker(url)
            patient.hang = True
            before = patient.probes
            await until(lambda before=before: patient.probes > before)  # type: ignore[misc]  # one is under way
            await running.client.post("/remove_worker", json={"url": url})
            patient.hang = False
            patient.released.set()
            await until(lambda: not health._watches)
            patient.released = anyio.Event()
        before = patient.probes
        await anyio.sleep(0.2)
        assert patient.probes == before


async def test_probes_leave_no_connection_open(start: Start) -> None:
    patient = Patient("7")
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        for status in (200, 503):
            patient.status = status
            await until(lambda: patient.probes > 5)
            open_before = len(os.listdir("/proc/self/fd"))
            patient.probes = 0
            await until(lambda: patient.probes > 30)
            assert (
                len(os.listdir("/proc/self/fd")) <= open_before + 2
            )  # the probe that is under way, both ends
            patient.probes = 0


async def test_probing_can_be_disabled(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*FAST, "--disable-health-check") as running:
        await running.client.post("/add_worker", json={"url": url})
        await anyio.sleep(0.2)
        assert patient.probes == 0


async def test_joining_and_draining_workers_are_not_judged(start: Start) -> None:
    patient, changes = Patient(), Changes()
    patient.info_status = 500  # it is starting
    patient.status = 503
    startup = ("--worker-startup-check-interval", "0.05")
    async with serving(patient.app) as url, start(*FAST, *startup) as running:
        running.router.hooks._worker_changed.append(("changes", changes.worker_changed))
        await running.client.post("/add_worker", json={"url": url})
        await anyio.sleep(0.3)
        assert the_worker(running).state == "joining"
        assert patient.probes == 0
        patient.info_status = patient.status = 200
        await until(lambda: the_worker(running).state == "ready" and patient.probes > 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.client.get, "/late")
            await until(lambda: the_worker(running).in_flight == 1)
            await running.client.delete(f"/workers/{the_worker(running).id}", params={"drain": "true"})
            patient.status = 503
            await anyio.sleep(0.3)
            assert the_worker(running).state == "draining"
            patient.status = 200
            await anyio.sleep(0.3)
            assert the_worker(running).state == "draining"
            patient.released.set()
        await until(lambda: not len(running.router.pool))
        assert changes.seen == ["draining", "removed"]


async def test_a_worker_that_leaves_while_it_is_probed_is_not_brought_back(start: Start) -> None:
    patient = Patient()
    flags = ("--health-check-interval-secs", "0.02")
    async with serving(patient.app) as url, start(*flags) as running:
        await running.client.post("/add_worker", json={"url": url})
        await until(lambda: patient.probes > 2)
        patient.hang, before = True, patient.probes
        await until(lambda: patient.probes > before)
        worker = the_worker(running)
        with Exchange(RouterRequest("GET", b"/", [])) as exchange:
            exchange.lease(worker)  # so that it stays for a while
            await running.client.delete(f"/workers/{worker.id}", params={"drain": "true"})
            patient.released.set()
            await anyio.sleep(0.3)
            assert worker.state == "draining"
        await until(lambda: not len(running.router.pool))


async def test_the_log_has_a_line_for_each_change_and_none_for_each_probe(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    patient = Patient()
    caplog.set_level(logging.INFO)
    async with serving(patient.app) as url, start(*FAST) as running:
        await running.client.post("/add_worker", json={"url": url})
        patient.status = 503
        await until(lambda: the_worker(running).state == "quarantined")
        before = patient.probes
        await until(lambda: patient.probes > before + 10)
        patient.status = 200
        await until(lambda: the_worker(running).state == "ready")
    told = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith(f"worker {url}")
    ]
    assert told == [
        f"worker {url}: added, it has not answered yet",
        f"worker {url} is ready",
        f"worker {url} gets no new requests after 3 failures in a row, the last: it answered /health with 503",
        f"worker {url}: quarantined, it answered /health with 503",
        f"worker {url}: readmitted",
    ]


async def test_a_router_that_ends_while_probes_hang_ends_at_once_and_in_silence(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    patients = [Patient() for _ in range(5)]
    caplog.set_level(logging.WARNING)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(each.app, grace_s=0.1)) for each in patients]
        async with start("--health-check-interval-secs", "0.02") as running:
            for each, url in zip(patients, urls, strict=True):
                each.hang = True
                await running.client.post("/add_worker", json={"url": url})
            await until(lambda: all(each.probes for each in patients))
            began = anyio.current_time()
        assert anyio.current_time() - began < 3
        for each in patients:
            each.released.set()
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--health-check-interval-secs", "0"),
        ("--health-check-interval-secs", "inf"),
        ("--health-check-timeout-secs", "-1"),
        ("--health-check-timeout-secs", "nan"),
        ("--health-failure-threshold", "0"),
        ("--health-success-threshold", "0"),
        ("--health-check-endpoint", "health"),
        ("--health-check-endpoint", "/he alth"),
        ("--health-check-endpoint", "/health\r\nx: y"),
        ("--readmit", "all"),
    ],
)
def test_bad_values_are_refused_by_name(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, value]) == 2
    assert flag in capsys.readouterr().err


async def test_slimes_names_of_the_flags_are_the_same_flags(start: Start) -> None:
    given = [
        "--rollout-health-check-interval", "7",
        "--rollout-health-check-timeout", "8",
        "--slime-router-health-check-failure-threshold", "9",
    ]  # fmt: skip
    async with start(*given) as running:
        settings = Settings.from_options(running.router.options)
        assert (settings.interval_s, settings.timeout_s, settings.failure_threshold) == (7, 8, 9)
