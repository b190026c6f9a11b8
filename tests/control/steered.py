"""Workers whose every answer to a control call a test decides, and a router with the control plane before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plugged import routing
from slime_control import Control, Settings
from slime_health import Settings as HealthSettings
from slime_http.serving import serving
from slime_testing import Running

__all__ = ["RARE_PROBES", "Controlled", "Steered", "hung", "steering"]

#: Health checks that probe no worker while a test runs, unless there is news of it.
RARE_PROBES = HealthSettings(interval_s=600)
_UPDATES = tuple(f"/update_weights_from_{source}" for source in ("disk", "tensor", "distributed", "ipc"))


class Steered:
    """A worker that does as it is told, keeps what it got, and answers ``answers[path]`` where a test set it.

    While ``hold`` is set to an event it answers control calls when that happens. It is not a FakeEngine, whose ``hold``
    is for streams and whose ``answers`` are given at once.
    """

    def __init__(self, version: str = "default", tp_size: object = 1) -> None:
        self.version = version
        self.tp_size = tp_size
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.got: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.generated = 0
        self.hold: anyio.Event | None = None
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/model_info", self._model_info),
                Route("/get_model_info", self._model_info),
                Route("/server_info", self._server_info),
                Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT"]),
            ]
        )

    def bodies(self, path: str) -> list[Any]:
        return [orjson.loads(body) for _, got, body in self.got if got == path]

    async def _model_info(self, request: Request) -> Response:
        if request.url.path in self.answers:
            status, body = self.answers[request.url.path]
            return Response(body, status)
        return JSONResponse({"weight_version": self.version})

    async def _server_info(self, request: Request) -> Response:
        if request.url.path in self.answers:
            status, body = self.answers[request.url.path]
            return Response(body, status)
        return JSONResponse({"tp_size": self.tp_size})

    async def _answer(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        if path in ("/generate", "/v1/completions", "/tokenize"):
            self.generated += path != "/tokenize"
            return JSONResponse({"text": "said", "output_ids": [1], "meta_info": {"id": "r"}})
        self.got.append((request.method, path, body))
        self.headers.append(dict(request.headers))
        if self.hold is not None:
            await self.hold.wait()
        if path in self.answers:
            status, content = self.answers[path]
            return Response(content, status)
        if path in _UPDATES:
            given = orjson.loads(body)
            self.version = str(given.get("weight_version", self.version))
        if path == "/update_weight_version":
            self.version = orjson.loads(body)["new_version"]
        return JSONResponse({"success": True, "message": "done"})


def hung() -> Steered:
    """A worker that answers no control call while the test runs."""
    worker = Steered()
    worker.hold = anyio.Event()
    return worker


@dataclass(frozen=True)
class Controlled(Running):
    """A router that serves, and its control plane."""

    control: Control


@asynccontextmanager
async def steering(
    *workers: Steered,
    timeout_s: float = 10.0,
    queue_s: float = 10.0,
    beside: Mapping[str, object] | None = None,
) -> AsyncIterator[Controlled]:
    """A router with ``workers``, which know their ``url`` then; no health checks, which would bring them back."""
    control = Control(Settings(timeout_s, queue_s))
    async with AsyncExitStack() as stack:
        for worker in workers:
            worker.url = await stack.enter_async_context(serving(worker.app, grace_s=0.1))
        running = await stack.enter_async_context(routing({"control": control, **(beside or {})}))
        for worker in workers:
            await running.router.add_worker(worker.url)
        try:
            yield Controlled(running.router, running.url, running.client, control)
        finally:
            for worker in workers:
                if worker.hold is not None:
                    worker.hold.set()
