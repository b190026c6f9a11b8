"""A client hangs up: its worker's connection is closed at once, and nothing is counted any more."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from core.servers import Script, Scripted, Wire, answer, dial, on_both_loops, scripted
from deadlines import HANG_S, until
from holding import add_ready
from router_core.workers import Worker
from routers import BARE, Start
from slime_testing import Running

pytestmark = [pytest.mark.anyio, on_both_loops]

#: "At once", on a busy machine.
MOMENT_S = 2.0
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def closed(raw: socket.socket) -> None:
    raw.close()


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def at_rest(running: Running) -> bool:
    """Nothing in flight, no connection to a worker open."""
    return not running.router.proxy.open_connections and not any(
        worker.in_flight for worker in running.router.pool
    )


class Watched:
    """A worker that plays ``part`` and then tells when the router hangs up."""

    def __init__(self, part: Script) -> None:
        self.reached = asyncio.Event()
        self.left = asyncio.Event()
        self._part = part

    async def __call__(self, wire: Wire) -> None:
        if await wire.head() is not None:
            await self._part(wire)
            self.reached.set()
            await wire.until_closed()
            self.left.set()


@asynccontextmanager
async def routed(start: Start, script: Script) -> AsyncIterator[tuple[Running, Scripted]]:
    async with scripted(script) as worker, start(*BARE, "--worker-urls", worker.url) as running:
        yield running, worker


async def say(raw: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(raw, data)


async def nothing(_: Wire) -> None:
    pass


async def one_event(wire: Wire) -> None:
    await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")


async def flood(wire: Wire) -> None:
    """More than anybody takes: the worker is held back when this gives up."""
    await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
    while True:
        with anyio.move_on_after(0.3) as held:
            if not await wire.send(bytes(1 << 20)):
                return
        if held.cancelled_caught:
            return


PARTS = {"waiting for an answer": nothing, "in the middle of a stream": one_event, "held back": flood}


@pytest.mark.parametrize("when", PARTS)
async def test_a_client_that_hangs_up_ends_its_workers_connection(start: Start, when: str) -> None:
    watched: list[Watched] = []

    async def script(wire: Wire) -> None:
        if watched:
            await watched[-1](wire)
        else:
            await wire.head()  # the router's own look

    async with routed(start, script) as (running, worker):
        for hang_up in (closed, reset):
            watched.append(Watched(PARTS[when]))
            raw = await dial(running.url, receive_buffer=64 * 1024)
            await say(raw, HEAD % 2 + b"{}")
            with anyio.fail_after(HANG_S):
                await watched[-1].reached.wait()
            if when == "in the middle of a stream":
                received = b""
                while b"data: 1" not in received:
                    received += await asyncio.get_running_loop().sock_recv(raw, 1 << 16)
            assert [registered.in_flight for registered in running.router.pool] == [1]
            hang_up(raw)
            with anyio.fail_after(MOMENT_S):
                await watched[-1].left.wait()
            await until(lambda: at_rest(running))
        assert worker.accepted == 2


async def test_a_client_that_hangs_up_while_uploading_reaches_no_worker(start: Start) -> None:
    async with routed(start, Watched(nothing)) as (running, worker):
        for sent in (0, 1, 50_000, 99_999):
            raw = await dial(running.url)
            await say(raw, HEAD % 100_000 + bytes(sent))
            await anyio.sleep(0.02)
            raw.close()
        await anyio.sleep(0.05)
        assert at_rest(running)
        assert worker.accepted == 0


async def test_a_client_that_hangs_up_while_its_body_goes_to_a_slow_worker(start: Start) -> None:
    watched = Watched(nothing)

    async def slow(wire: Wire) -> None:
        wire.buffers(64 * 1024)
        await anyio.sleep(0.2)  # reads nothing; the router is in the middle of sending
        await watched(wire)

    async with routed(start, slow) as (running, _):
        raw = await dial(running.url)
        await say(raw, HEAD % (32 << 20) + bytes(32 << 20))
        await until(lambda: any(worker.in_flight for worker in running.router.pool))
        raw.close()
        await until(lambda: at_rest(running))


async def test_a_client_that_hangs_up_while_the_worker_is_being_connected_to(start: Start) -> None:
    async def mute(wire: Wire) -> None:
        await wire.until_closed()  # a TLS handshake that never ends

    async with scripted(mute) as worker, start(*BARE) as running:
        # Put into the pool by hand: a probe would get stuck in the handshake as well.
        add_ready(running.router.pool, Worker(worker.url.replace("http:", "https:")))
        raw = await dial(running.url)
        await say(raw, HEAD % 0)
        await until(lambda: running.router.proxy.open_connections == 1)
        raw.close()
        await until(lambda: at_rest(running))


async def test_a_router_that_lost_clients_serves_the_next_ones(start: Start) -> None:
    async def script(wire: Wire) -> None:
        while request := await wire.request():
            if b"/slow" in request.line:
                await wire.until_closed()
                return
            await wire.send(answer(request.body))

    async with routed(start, script) as (running, _):
        for _ in range(10):
            raw = await dial(running.url)
            await say(raw, b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: any(worker.in_flight for worker in running.router.pool))
            raw.close()
            assert (await running.client.post("/", content=b"next")).content == b"next"
        await until(lambda: not any(worker.in_flight for worker in running.router.pool))
        assert running.router.proxy.open_connections <= 1  # one may be idle


async def test_a_pipelined_request_is_answered_in_turn(start: Start) -> None:
    async def script(wire: Wire) -> None:
        while request := await wire.request():
            await wire.send(answer(request.line.split(b" ")[1]))

    async with routed(start, script) as (running, _):
        with await dial(running.url) as raw:
            await say(
                raw, b"".join(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number for number in range(5))
            )
            received = b""
            with anyio.fail_after(HANG_S):
                while received.count(b"HTTP/1.1 200") < 5 or not received.endswith(b"/4"):
                    received += await asyncio.get_running_loop().sock_recv(raw, 1 << 16)
            assert [part[-2:] for part in received.split(b"HTTP/1.1 200 OK")[1:]] == [
                b"/%d" % number for number in range(5)
            ]
