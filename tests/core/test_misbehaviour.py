"""Clients, workers and middleware that do what they should not; the router goes on."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from core.servers import Wire, answer, scripted
from deadlines import HANG_S
from holding import ready
from router_core.cli import build
from router_core.errors import BadRequest, SettingsError
from router_core.weights import WeightVersions
from router_core.workers import worker_url
from routers import BARE, Start, answering
from slime_http.serving import bind, serving
from slime_testing import Running

REPLAYING = """
class Replaying:
    def __init__(self, app, *, router):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = (await receive()).get("body", b"")

        async def again():
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)
"""


async def slowly(wire: Wire) -> None:
    while request := await wire.request():
        await anyio.sleep(0.3)
        await wire.send(answer(request.body))


@pytest.fixture
def replaying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    Path(tmp_path, "replaying.py").write_text(REPLAYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "replaying", raising=False)
    return "replaying.Replaying"


@pytest.mark.anyio
async def test_middleware_that_replays_the_body_does_not_hang_the_router(
    start: Start, replaying: str
) -> None:
    async with (
        scripted(slowly) as worker,
        start(*BARE, "--middleware-paths", replaying, "--worker-urls", worker.url) as running,
    ):
        with anyio.fail_after(25):
            assert (await running.client.post("/", content=b"hello")).content == b"hello"


@pytest.mark.anyio
async def test_half_close_during_an_upload_fails_request_and_returns_lease(
    start: Start,
) -> None:
    async def half_closing(wire: Wire) -> None:
        if await wire.head():
            await wire.end()
            await anyio.sleep(30)

    async with scripted(half_closing) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        with anyio.fail_after(25):
            refused = await running.client.post("/", content=b"x" * (20 << 20))
        assert refused.status_code == 502
        assert [registered.in_flight for registered in running.router.pool] == [0]


@pytest.mark.parametrize(
    ("given", "spelt"),
    [
        ("http://127.1:3", "http://127.0.0.1:3"),
        ("http://0x7F000001:3", "http://127.0.0.1:3"),
        ("http://[::ffff:10.0.0.7]:3", "http://10.0.0.7:3"),
        ("http://LOCALHOST:80/", "http://localhost"),
        ("https://h:443", "https://h"),
        ("http://127.0.0.1:30001", "http://127.0.0.1:30001"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
        ("http://sglang_worker-0.svc:1", "http://sglang_worker-0.svc:1"),
    ],
)
def test_a_worker_has_one_name(given: str, spelt: str) -> None:
    assert worker_url(given) == spelt


NO_WORKER_URLS = (
    "http://:pw@h", "http://u@h", "http://{}:80", 'http://"x":80', "http://h:", "http://h:0", "http://h:99999",
    "ftp://h", "h:80", "", "http://", "http://h/path", "http://h?q", "http://h#f", "http://[v1.a]:80",
    "http://h\r\nx: 1", "http://h h", "http://.h", "http://ｈ:1",
)  # fmt: skip


@pytest.mark.parametrize("given", NO_WORKER_URLS)
def test_invalid_worker_url_is_refused(given: str) -> None:
    with pytest.raises(BadRequest, match="wanted a worker URL"):
        worker_url(given)


@pytest.mark.anyio
async def test_a_worker_url_that_no_client_can_parse_does_not_end_the_router(start: Start) -> None:
    async with start("--health-check-interval-secs", "0.01") as running:
        for _ in range(3):
            added = await running.client.post("/add_worker", json={"url": "http://xn--a:80"})
            assert added.status_code == 200
            assert "warning" in added.json()
        await anyio.sleep(0.2)  # some probes
        assert (await running.client.get("/health")).status_code == 200


def test_versions_of_any_length_are_ordered_as_numbers() -> None:
    versions = WeightVersions()
    long = "9" * 5000
    for version in ("10", long, "2", "007"):
        versions.see(version)
    assert versions.ordered == ("2", "007", "10", long)


@pytest.mark.anyio
async def test_too_long_version_is_refused_and_the_next_one_passes(start: Start) -> None:
    async with start() as running:
        refused = await running.client.post("/weight_version", json={"weight_version": "9" * 5000})
        assert refused.status_code == 400
        told = await running.client.post("/weight_version", json={"weight_version": "2"})
        assert told.json()["weight_version"] == "2"


@pytest.mark.anyio
async def test_a_worker_that_drips_its_introduction_is_told_off_in_time(start: Start) -> None:
    async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        try:
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.2)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(dripping, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with start(*BARE) as running:
        with anyio.fail_after(HANG_S):
            added = await running.client.post("/add_worker", json={"url": f"http://127.0.0.1:{port}"})
        assert "no answer within 2 s" in added.json()["warning"]
    server.close()


@pytest.mark.anyio
async def test_dead_workers_are_each_tried_once_and_the_answer_is_502(start: Start) -> None:
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as two:
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (one, two)]
    async with start(*BARE, "--worker-urls", *urls) as running:
        for worker in running.router.pool:
            ready(running.router.pool, worker)  # they answered once
        refused = await running.client.get("/")
        assert refused.status_code == 502
        assert refused.json()["error"]["code"] == "WORKER_UNREACHABLE"
        assert [worker.in_flight for worker in running.router.pool] == [0, 0]


@pytest.mark.anyio
async def test_registering_a_live_worker_again_leaves_its_sessions_with_it(start: Start) -> None:
    async with serving(answering(b"one")) as one, serving(answering(b"two")) as two, start(*BARE) as running:
        for url in (one, two):
            await running.client.post("/add_worker", json={"url": url})
        names = [str(number) for number in range(20)]

        async def asked() -> list[bytes]:
            return [(await running.client.get("/", headers={"x-session-id": name})).content for name in names]

        before = await asked()
        async with anyio.create_task_group() as tasks:
            for url in (one, two):
                tasks.start_soon(_register, running, url)
            during = await asked()
        assert before == during == await asked()


async def _register(running: Running, url: str) -> None:
    await running.client.post("/add_worker", json={"url": url})


@pytest.mark.anyio
async def test_the_payload_limit_holds_for_the_routers_own_routes(start: Start) -> None:
    async with start(*BARE, "--max-payload-size", "1000") as running:
        refused = await running.client.post("/add_worker", content=b"x" * 100_000)
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "PAYLOAD_TOO_LARGE"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 20), 431),
    ],
)
@pytest.mark.anyio
async def test_requests_that_are_not_http_are_refused_as_json(start: Start, sent: bytes, status: int) -> None:
    async with start(*BARE) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(running.url).port)
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"content-type: application/json" in head
        assert (await reader.read(2)) == b'{"'
        writer.transport.abort()


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1"])
def test_durations_must_be_finite_and_positive(value: str) -> None:
    with pytest.raises(SettingsError, match="--shutdown-grace-period-secs: wanted a number above 0"):
        build([*BARE, "--shutdown-grace-period-secs", value])


def test_list_flags_that_are_repeated_add_up() -> None:
    router, _ = build([*BARE, "--worker-urls", "http://a:1", "--worker-urls", "http://b:1", "http://a:1"])
    assert router.settings.worker_urls == ("http://a:1", "http://b:1")


@pytest.mark.anyio
async def test_a_server_whose_user_fails_still_ends_properly() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with serving(answering(b"ok")) as url:
            raise KeyError("the user's own")
    assert failed.value.subgroup(KeyError) is not None
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient(trust_env=False).get(url)
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) != 0
