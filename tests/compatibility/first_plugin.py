"""A plugin as the first page on hooks describes it, with each hook and each object of that page.

Do not adapt it to a later router: a router that cannot run it breaks the plugins of other people.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router_core import Exchange, Reply, SettingsError, WeightUpdate, Worker, hookimpl


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first-limit", type=int, default=0, metavar="N", help="requests that are answered")


def make_plugin(options: argparse.Namespace) -> First:
    if options.first_limit < 0:
        raise SettingsError(f"--first-limit: wanted 0 or more, got {options.first_limit}")
    return First(options.first_limit)


class First:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.answered = 0
        self.seen: list[Any] = []

    @hookimpl
    def setup(self, router: Any) -> None:
        self.router = router
        router.components.register("first", self)
        assert router.components.get("first") is self
        assert router.options.first_limit == self.limit

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/first/seen", self.show, methods=["GET"]),
            Route("/first/ask", self.ask, methods=["GET"]),
        ]

    async def show(self, _: Request) -> JSONResponse:
        return JSONResponse({"seen": self.seen, "versions": list(self.router.weights.ordered)})

    async def ask(self, _: Request) -> Response:
        async with self.router.generate({"text": "own"}, session="first") as reply:
            return Response(await reply.read(), reply.status)

    @hookimpl
    @asynccontextmanager
    async def lifespan(self, router: Any) -> AsyncIterator[None]:
        begun = anyio.Event()
        router.tasks.start_soon(self.watch, begun)
        await begun.wait()
        assert not router.http.is_closed
        yield

    async def watch(self, begun: anyio.Event) -> None:
        self.seen.append("watching")
        begun.set()
        await anyio.sleep_forever()

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply | None:
        request = exchange.request
        if request.path != "/generate":
            return None
        if 0 < self.limit <= self.answered:
            return Reply.from_json({"error": {"message": "come back later"}}, 429, [(b"retry-after", b"1")])
        self.answered += 1
        exchange.on_close(lambda: self.seen.append("closed"))
        exchange.notes["first"] = exchange.session
        request.headers.append((b"x-first", b"1"))
        request.replace_json({**request.json(), "first": request.method})
        return None

    @hookimpl
    def select_worker(self, workers: Sequence[Worker]) -> Worker | None:
        return min(workers, key=lambda worker: (worker.in_flight, worker.url))

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        reply = exchange.reply
        if reply is None or exchange.worker is None:
            return
        reply.tap(self)
        reply.headers.append((b"x-first", repr(exchange.notes.get("first")).encode()))
        if reply.status == 200 and exchange.request.path == "/generate":
            reply.replace_body(await reply.read(1 << 20) + b"\n")

    def feed(self, chunk: bytes) -> None:
        self.seen.append(chunk.decode())

    def close(self, complete: bool) -> None:
        self.seen.append(complete)

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self.seen.append([update.previous, update.version, update.source])

    @hookimpl
    def worker_changed(self, worker: Worker, change: str) -> None:
        self.seen.append([worker.url, change])
