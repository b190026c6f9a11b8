"""A worker whose health, weights and manners a test decides, which can die and come back at its URL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deadlines import until
from router_core import Worker, hookimpl
from router_core.workers import WorkerChange
from routers import BARE
from slime_http.serving import serving
from slime_testing import Running

__all__ = ["FAST", "ONLY", "Changes", "Patient", "serving_again", "the_worker", "until"]

FAST = ("--health-check-interval-secs", "0.02", "--health-check-timeout-secs", "0.2")
#: No other plugin, which might repeat what failed.
ONLY = (*BARE, "--plugin", "health")


class Patient:
    """``/health`` answers ``status``, once ``released`` while ``hang`` is set; ``/model_info`` tells ``version``.

    Streams go on until ``released``, a piece every ``pace_s``. It is not a FakeEngine, since it has no generations.
    """

    def __init__(self, version: str | None = None) -> None:
        self.status = 200
        self.version = version
        self.info_status = 200
        self.info_hold: anyio.Event | None = None  # what it says is settled before it waits for this
        self.info_held = False
        self.old = False  # it knows the old name of that only
        self.probes = 0
        self.headers: list[dict[str, str]] = []
        self.streams = 0
        self.hang = False
        self.pace_s = 0.01
        self.released = anyio.Event()
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/model_info", self.about),
                Route("/get_model_info", self.about),
                Route("/work", self.work),
                Route("/stream", self.stream),
                Route("/late", self.late),
            ]
        )

    async def health(self, request: Request) -> Response:
        self.probes += 1
        self.headers.append(dict(request.headers))
        if self.hang:
            await self.released.wait()
        return Response(status_code=self.status)

    async def about(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        if self.old and request.url.path == "/model_info":
            return Response(status_code=404)
        about = {} if self.version is None else {"weight_version": self.version}
        if self.info_hold is not None:
            self.info_held = True
            await self.info_hold.wait()
        return JSONResponse(about, self.info_status)

    async def work(self, _: Request) -> Response:
        return Response("done", headers={"connection": "close"})

    async def late(self, _: Request) -> Response:
        await self.released.wait()
        return Response("late")

    async def stream(self, _: Request) -> Response:
        return StreamingResponse(self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            while not self.released.is_set():
                yield b"piece "
                with anyio.move_on_after(self.pace_s):
                    await self.released.wait()
        finally:
            self.streams -= 1


@asynccontextmanager
async def serving_again(patient: Patient, url: str) -> AsyncIterator[None]:
    """``patient`` is back at the URL at which it was before."""
    async with serving(patient.app, port=urlsplit(url).port or 0, grace_s=0.1):
        yield


class Changes:
    """A plugin that keeps what became of the workers."""

    def __init__(self) -> None:
        self.seen: list[WorkerChange] = []

    @hookimpl
    def worker_changed(self, worker: Worker, change: WorkerChange) -> None:
        if change != "added":
            self.seen.append(change)


def the_worker(running: Running) -> Worker:
    (worker,) = running.router.pool
    return worker
