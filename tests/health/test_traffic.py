"""Traffic is evidence: what fails counts at once, and who is heard is not dead, however slow its probes."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import httpx
import pytest

from core.servers import Wire, answer, dial, scripted
from deadlines import HANG_S
from health.patient import ONLY, Patient, the_worker, until
from plugged import routing
from routers import Start
from slime_health import Health, Settings
from slime_http.serving import bind, serving
from slime_testing import Running

pytestmark = pytest.mark.anyio

#: Nothing but traffic is heard within the time of a test.
RARELY = (*ONLY, "--health-check-interval-secs", "1000")


async def status(running: Running, path: str = "/work") -> int:
    return (await running.client.get(path)).status_code


async def test_three_requests_that_are_refused_quarantine_a_dead_worker_at_once(start: Start) -> None:
    patient = Patient()
    async with start(*RARELY) as running:
        async with serving(patient.app, grace_s=0.1) as url:
            await running.client.post("/add_worker", json={"url": url})
            assert await status(running) == 200
        began = anyio.current_time()
        states = []
        for _ in range(3):
            assert await status(running) == 502
            states.append(the_worker(running).state)
        assert states == ["ready", "ready", "quarantined"]
        assert anyio.current_time() - began < 0.5
        assert "Connect" in (the_worker(running).reason or "")
        assert await status(running) == 503


async def test_streams_that_break_off_together_quarantine_their_worker_at_once(start: Start) -> None:
    async def script(wire: Wire) -> None:
        if await wire.request() is not None:
            await wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\npiece\r\n")
            await dying.wait()
            wire.reset()

    dying = anyio.Event()
    async with (
        scripted(script) as worker,
        start(*RARELY, "--worker-urls", worker.url) as running,
        anyio.create_task_group() as tasks,
    ):
        await until(lambda: running.router.pool.healthy == 1)

        async def stream() -> None:
            with suppress(httpx.RemoteProtocolError):
                await running.client.get("/stream")

        for _ in range(20):
            tasks.start_soon(stream)
        await until(lambda: len(worker.carrying) == 20)
        await anyio.sleep(0.1)  # all have been heard
        dying.set()
        began = anyio.current_time()
        await until(lambda: the_worker(running).state == "quarantined")
        assert anyio.current_time() - began < 0.4


async def test_answers_in_between_clear_broken_requests(start: Start) -> None:
    async def script(wire: Wire) -> None:
        while (request := await wire.request()) is not None:
            if b"/work" not in request.line:
                return
            await wire.send(answer(b"done"))
            await anyio.sleep(0.002)  # the loop's clock moves on

    async with scripted(script) as worker, start(*RARELY, "--worker-urls", worker.url) as running:
        await until(lambda: running.router.pool.healthy == 1)
        for _ in range(4):
            for path, expected in (("/break", 502), ("/break", 502), ("/work", 200)):
                await anyio.sleep(0.002)
                assert await status(running, path) == expected
        assert the_worker(running).state == "ready"
        for _ in range(3):
            await status(running, "/break")
        assert the_worker(running).state == "quarantined"


async def test_worker_that_refuses_connections_gets_no_more_requests(start: Start) -> None:
    """As an engine does that was told to end."""
    patient = Patient()
    ended = anyio.Event()

    async def serve_until_ended(*, task_status: anyio.abc.TaskStatus[str]) -> None:
        async with serving(patient.app, grace_s=30) as url:
            task_status.started(url)
            await ended.wait()

    async with anyio.create_task_group() as tasks, start(*RARELY) as running:
        url = await tasks.start(serve_until_ended)
        await running.client.post("/add_worker", json={"url": url})
        pieces = 0
        finished = anyio.Event()

        async def read() -> None:
            nonlocal pieces
            async with running.client.stream("GET", "/stream") as streamed:
                async for _ in streamed.aiter_raw():
                    pieces += 1
            finished.set()

        tasks.start_soon(read)
        await until(lambda: pieces > 3)
        ended.set()
        await anyio.sleep(0.1)
        for _ in range(3):
            heard = pieces
            await until(lambda heard=heard: pieces > heard)  # type: ignore[misc]  # bound here
            assert await status(running) == 502
        assert the_worker(running).state == "quarantined"
        heard = pieces
        await until(lambda: pieces > heard + 3)  # and what it has goes on
        patient.released.set()
        await finished.wait()


async def test_generation_past_its_deadline_is_no_failure_of_the_worker(start: Start) -> None:
    patient = Patient()
    deadline = ("--request-timeout-secs", "0.1")
    async with serving(patient.app) as url, start(*RARELY, *deadline) as running:
        await running.client.post("/add_worker", json={"url": url})
        for _ in range(4):
            assert await status(running, "/late") == 504
        assert the_worker(running).state == "ready"
        await until(lambda: patient.probes > 0)  # which is asked instead, and soon
        assert the_worker(running).state == "ready"
        patient.released.set()


async def test_a_request_that_the_client_gives_up_says_nothing_about_the_worker(start: Start) -> None:
    patient = Patient()
    async with serving(patient.app) as url, start(*RARELY) as running:
        await running.client.post("/add_worker", json={"url": url})
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                await running.client.get("/late", timeout=0.1)
        await until(lambda: not the_worker(running).in_flight)
        assert the_worker(running).state == "ready"
        patient.released.set()


async def test_a_router_without_file_descriptors_blames_no_worker(start: Start) -> None:
    patient = Patient()
    impatient = ("--connect-timeout-secs", "0.05")
    async with serving(patient.app) as url, start(*RARELY, *impatient) as running:
        await running.client.post("/add_worker", json={"url": url})
        assert await status(running) == 200  # the client's connection stays open, the worker's does not
        await anyio.sleep(0.1)  # nothing is heard meanwhile
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        try:
            answers = [await running.client.get("/work") for _ in range(5)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [each.status_code for each in answers] == [502] * 5
        assert "Too many open files" in answers[0].text
        assert the_worker(running).state == "ready"
        assert await status(running) == 200


@dataclass
class Choosy:
    """A worker whose kernel accepts nothing more from some moment on, while its streams go on."""

    listener: socket.socket
    url: str
    streams: int = 0
    waiting: list[socket.socket] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /stream"):
                self.streams += 1
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                while not writer.is_closing():
                    writer.write(b"5\r\npiece\r\n")
                    await anyio.sleep(0.02)
                self.streams -= 1
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def stop_accepting(self) -> None:
        """Fill the backlog: from then on connections are not refused, nothing happens."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.listener)
        self.listener.listen(0)
        full = False
        while not full:
            raw = socket.socket()
            raw.setblocking(False)
            self.waiting.append(raw)
            with anyio.move_on_after(0.3) as scope:
                await loop.sock_connect(raw, self.listener.getsockname())
            full = scope.cancelled_caught


@asynccontextmanager
async def choosy() -> AsyncIterator[Choosy]:
    listener = bind("127.0.0.1", 0)
    worker = Choosy(listener, f"http://127.0.0.1:{listener.getsockname()[1]}")
    async with await asyncio.start_server(worker.serve, sock=listener):
        try:
            yield worker
        finally:
            for raw in worker.waiting:
                raw.close()
            await until(lambda: not worker.streams)


@pytest.mark.parametrize("streams", [True, False])
async def test_unreachable_worker_is_dead_unless_its_streams_go_on(start: Start, streams: bool) -> None:
    limits = ("--connect-timeout-secs", "0.1", "--health-check-timeout-secs", "0.1")
    async with choosy() as worker, start(*RARELY, *limits) as running, anyio.create_task_group() as tasks:
        await running.client.post("/add_worker", json={"url": worker.url})

        async def read() -> None:
            with suppress(httpx.RemoteProtocolError):
                await running.client.get("/stream")

        if streams:
            tasks.start_soon(read)
            await until(lambda: worker.streams == 1)
        await worker.stop_accepting()
        answers = [await status(running) for _ in range(4)]
        if streams:
            assert answers == [504] * 4
            await anyio.sleep(1.5)  # the next probe was due within a second
            assert the_worker(running).state == "ready"
        else:
            assert answers == [504] * 3 + [503]
            assert the_worker(running).state == "quarantined"
        tasks.cancel_scope.cancel()


async def read_stream(url: str, received: list[int], number: int) -> None:
    raw = await dial(url)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(raw, b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while await loop.sock_recv(raw, 65536):
            received[number] += 1
    finally:
        raw.close()


@pytest.mark.slow
async def test_worker_with_300_streams_stays_ready_while_probes_hang() -> None:
    """Each probe misses its deadline, and one would be enough to quarantine an idle worker."""
    patient = Patient()
    patient.hang, patient.pace_s = True, 0.5
    health = Health(Settings(interval_s=0.05, timeout_s=1, failure_threshold=1))
    count = 300
    received = [0] * count
    async with serving(patient.app) as url, routing({"health": health}) as running:
        await running.router.add_worker(url)
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(read_stream, running.url, received, number)
                if number == 0:
                    await until(lambda: received[0] > 0)  # some traffic before the first probe
                    tasks.start_soon(keep_talking, running.url)
            with anyio.fail_after(HANG_S):
                while patient.streams < count:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            before = patient.probes
            with anyio.fail_after(HANG_S):
                while patient.probes < before + 3:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert the_worker(running).state == "ready"
            assert min(received) > 0
            patient.pace_s = 1000
            patient.released.set()
            tasks.cancel_scope.cancel()


async def keep_talking(url: str) -> None:
    """A request now and then, so that something is heard also while the streams begin."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        while True:
            await client.get("/work")
            await anyio.sleep(0.05)
