"""The lines by which an operator sees what the router does, without ``--access-log``."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from deadlines import HANG_S, until
from router_core.errors import Forbidden, Unauthorized
from routers import Start
from slime_auth.refusals import Refusals
from slime_http.serving import serving
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "httpx")  # it tells URLs
    caplog.set_level(logging.INFO)


def lines(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(beginning)]


async def test_refused_requests_are_told_with_the_reason(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ("--api-key", "sec-ret", "--control-plane-api-keys", "ann:Ann:user:sec-ret-2")
    async with start(*keys) as running:
        for key in ("wrong-sec-ret", "wrong-sec-ret", "sec-ret-2"):
            path = "/workers?key=sec-ret" if key == "sec-ret-2" else "/generate"
            await running.client.post(path, json={}, headers={"authorization": f"Bearer {key}"})
        await running.client.post("/generate", json={})
    wanted = "wanted the router's key: Authorization: Bearer KEY"
    assert lines(caplog, "refused") == [
        f"refused POST /generate from 127.0.0.1 (401): {wanted}; got a key that the router does not know",
        "refused POST /workers from 127.0.0.1 (403): ann: this needs the router's admin key (--admin-api-key),"
        " or the role admin",
        f"refused POST /generate from 127.0.0.1 (401): {wanted}; got no Authorization header",
    ]
    assert "sec-ret" not in caplog.text


async def test_web_page_that_is_refused_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async with start() as running:
        await running.client.post("/flush_cache", headers={"origin": "http://evil.example"})
    (line,) = lines(caplog, "refused")
    assert line.startswith("refused POST /flush_cache from 127.0.0.1 (403): a web page of another site")


def test_repeated_refusals_are_counted_in_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 59.0, 61.0))
    refusals = Refusals(lambda: next(times))
    scope = {"method": "GET", "raw_path": b"/a\n" + b"a" * 9999, "headers": [], "client": ("10.0.0.9", 1)}
    for _ in range(4):
        refusals.add(scope, Unauthorized("wanted a key"))
    first, second = lines(caplog, "refused")
    assert first.endswith("(401): wanted a key")
    assert second.endswith("(2 more like this since the last line)")
    assert len(first) < 400


def test_memory_for_refusals_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(lambda: 0.0)
    for number in range(3000):
        scope = {"method": "GET", "raw_path": b"/", "headers": [], "client": (f"host-{number}", 1)}
        refusals.add(scope, Forbidden("x" * 9999))
    assert len(refusals._known) == 1024
    assert len(caplog.messages[-1]) < 400


async def test_pause_and_control_calls_are_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with serving(engine.app) as url, start("--worker-urls", url) as running:
        await running.client.post("/pause_generation", json={})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: running.client.post("/generate", json={}))
            await until(lambda: running.router.components.get("pending_aborts").gate.waiting == 1)
            await running.client.post("/continue_generation", json={})
        await running.client.post("/abort_request", json={"abort_all": True})
        await running.client.post("/flush_cache")
    assert lines(caplog, "generation")[0].startswith("generation is paused: new requests wait, ")
    assert lines(caplog, "generation")[1].endswith(" s; 1 requests waited")
    calls = [line.partition(" in ")[0] for line in lines(caplog, "/")]
    told = ("/pause_generation", "/continue_generation", "/flush_cache")
    assert calls == [f"{path}: 1 of 1 workers succeeded" for path in told]


async def test_new_state_of_a_worker_is_told_with_its_reason(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(FakeEngine().app) as url, start("--worker-urls", url) as running:
        (worker,) = running.router.pool
        running.router.pool.hold(worker, "health", "it does not answer", "quarantined")
        running.router.pool.release(worker, "health")
    assert f"worker {url}: quarantined, it does not answer" in caplog.messages
    assert f"worker {url}: readmitted" in caplog.messages


async def test_full_slots_and_a_full_queue_are_told_once_a_minute(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.delay = anyio.Event()
    engine.rest = lambda _: (200, b"{}")
    flags = ("--max-concurrent-requests", "1", "--queue-size", "1")
    statuses: list[int] = []
    async with serving(engine.app) as url, start("--worker-urls", url, *flags) as running:

        async def ask() -> None:
            statuses.append((await running.client.post("/generate", json={})).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            await until(lambda: len(statuses) == 2)
            engine.delay.set()
    assert sorted(statuses) == [200, 200, 429, 429]
    assert lines(caplog, "requests") == [
        "requests wait: all 1 slots are in use (--max-concurrent-requests)",
        "requests are refused (429): no slot of 1 is free (--max-concurrent-requests) and 1 wait (--queue-size)",
    ]


async def test_client_that_is_refused_before_the_application_is_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start("--client-timeout-secs", "0.1") as running:
        for sent in (b"no HTTP\r\n\r\n", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\na"):
            port = urlsplit(running.url).port
            assert port is not None
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(sent)
                with anyio.fail_after(HANG_S):
                    assert b"HTTP/1.1 4" in await stream.receive()
    first, second = [
        line.partition(": its request is refused ") for line in lines(caplog, "client 127.0.0.1:")
    ]
    assert first[2].startswith("(400): ")
    assert second[2] == "(408): the request did not go on for 0.1 s"


async def test_shutdown_tells_requests_in_flight_and_those_that_are_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    engine.delay = anyio.Event()
    async with anyio.create_task_group() as tasks:
        async with serving(engine.app, grace_s=1.0) as url:
            client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=HANG_S)
            tasks.start_soon(lambda: client.post("/generate?key=secret", json={}))
            await until(lambda: bool(engine.asked))
        await client.aclose()
    assert (
        "shutting down: no new requests; in flight, with 1 s to end: 1 (1 POST /generate)" in caplog.messages
    )
    assert "the grace period is over, cutting off 1 (1 POST /generate)" in caplog.messages
