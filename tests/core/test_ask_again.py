"""Plugins that mend a reply: another answer from a worker, and a stream that passes through their hands."""

from __future__ import annotations

import anyio
import pytest

from plugged import Recording, routing, until
from router_core import Exchange, Reply, hookimpl
from router_core.reply import BodySource
from router_core.request import Request
from router_core.router import Router

pytestmark = pytest.mark.anyio


class SecondOpinion:
    """Puts a worker's answer to another question into the place of the first one, after ``resting``."""

    def __init__(self, resting: anyio.Event) -> None:
        self.resting = resting
        self.leases: list[int] = []
        self.ended = 0

    @hookimpl
    def setup(self, router: Router) -> None:
        self.router = router

    def end(self) -> None:
        self.ended += 1

    def count(self) -> None:
        self.leases.append(sum(worker.in_flight for worker in self.router.pool))

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.on_close(self.end)
        await exchange.reply.read()
        self.count()
        exchange.release()
        self.count()
        await self.resting.wait()
        exchange.reply = await self.router.ask_again(exchange, Request("GET", b"/second", []))
        self.count()


async def test_a_worker_is_asked_again_under_a_lease_of_its_own() -> None:
    worker, resting = Recording(), anyio.Event()
    resting.set()
    plugin = SecondOpinion(resting)
    async with routing({"second": plugin}, worker) as running:
        answer = await running.client.get("/first")
        assert answer.json() == {"worker": "worker"}
    assert [path for path, _, _ in worker.requests] == ["/first", "/second"]
    assert plugin.leases == [1, 0, 1]


async def test_no_worker_is_asked_again_for_a_disconnected_client() -> None:
    worker = Recording()
    plugin = SecondOpinion(anyio.Event())
    async with routing({"second": plugin}, worker) as running:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.client.get, "/first")
            await until(lambda: plugin.leases == [1, 0])
            tasks.cancel_scope.cancel()
        await until(lambda: plugin.ended == 1)
        plugin.resting.set()
        assert (await running.client.get("/other")).status_code == 200
    assert [path for path, _, _ in worker.requests] == ["/first", "/other", "/second"]


class Shouting:
    """A stream in capitals."""

    def __init__(self, source: BodySource) -> None:
        self.source = source
        self.closed = False

    @property
    def finished(self) -> bool:
        return self.source.finished

    async def read(self) -> bytes:
        return (await self.source.read()).upper()

    def close(self) -> None:
        self.closed = True
        self.source.close()


class Loud:
    """Wraps streams."""

    def __init__(self) -> None:
        self.wrapped: list[Shouting] = []

    def wrap(self, source: BodySource) -> BodySource:
        self.wrapped.append(Shouting(source))
        return self.wrapped[-1]

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply | None:
        return Reply(200, [], b"whole") if exchange.request.path == "/whole" else None

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.reply.pass_through(self.wrap)


async def test_a_stream_passes_through_a_plugins_hands_piece_by_piece() -> None:
    plugin = Loud()
    async with routing({"loud": plugin}, Recording()) as running:
        async with running.client.stream("GET", "/stream") as answer:
            pieces = [piece async for piece in answer.aiter_raw()]
        assert b"".join(pieces) == b"ONE TWO THREE"
        assert len(pieces) > 1, "it was a stream"
        whole = await running.client.get("/whole")
        assert whole.content == b"whole"
        assert len(plugin.wrapped) == 1
        await until(lambda: plugin.wrapped[0].closed)


async def test_a_wrapped_stream_is_closed_with_its_client() -> None:
    plugin = Loud()
    endless = Recording(pieces=[b"x"] * 1000)
    async with routing({"loud": plugin}, endless) as running:
        async with running.client.stream("GET", "/stream") as answer:
            await anext(answer.aiter_raw())
        await until(lambda: plugin.wrapped[0].closed)
        await until(lambda: running.router.proxy.busy_connections == 0)
