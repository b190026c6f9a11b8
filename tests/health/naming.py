"""A worker that names the version of its weights in what it answers, as SGLang does, and is updated by a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from slime_testing import FakeEngine

__all__ = ["Naming"]


class Naming(FakeEngine):
    """``/generate`` names ``version``; what begins while ``hold`` is set ends with that, and names what was then.

    ``named``: what all its answers name instead. ``is_mute``: only its answers name a version. ``is_garbled``: its
    ``/model_info`` is not JSON. ``questions``: how often somebody has asked for it. ``info_hold`` and
    ``health_hold``: what these answers wait for. ``breaking``: streams break off once it is set.
    """

    def __init__(self, version: str = "1") -> None:
        super().__init__()
        self.version = version
        self.named: str | None = None
        self.is_mute = False
        self.is_garbled = False
        self.is_well = True
        self.info_hold: anyio.Event | None = None
        self.health_hold: anyio.Event | None = None
        self.probes = 0
        self.breaking: anyio.Event | None = None
        self.questions = 0
        self.url = ""
        self.hold_after = 1
        self.rest = self._answer
        self.app.routes[:0] = [
            Route("/health", self._health),
            Route("/model_info", self._model_info),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]

    async def _health(self, _: Request) -> Response:
        self.probes += 1
        if self.health_hold is not None:
            await self.health_hold.wait()
        return Response(status_code=200 if self.is_well else 503)

    async def _model_info(self, _: Request) -> Response:
        self.questions += 1
        if self.info_hold is not None:
            await self.info_hold.wait()
        if self.is_garbled:
            return Response('{"weight_version"', media_type="application/json")
        return JSONResponse({} if self.is_mute else {"weight_version": self.version})

    async def _chat(self, _: Request) -> Response:
        return JSONResponse({"choices": [], "metadata": {"weight_version": self.version}})

    def _naming(self, version: str) -> dict[str, Any]:
        version = self.named or version
        spans = [{"version": "0", "start": 0, "end": 1}, {"version": version, "start": 1, "end": 2}]
        meta = {"id": "r", "weight_version": version, "weight_versions": spans, "completion_tokens": 2}
        return {"text": 'a \\"weight_version\\":\\"9\\"', "output_ids": [1, 2], "meta_info": meta}

    @staticmethod
    async def _break_off(breaking: anyio.Event) -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        await breaking.wait()
        raise RuntimeError("this engine breaks off")

    def _answer(self, body: dict[str, Any]) -> list[Any] | StreamingResponse:
        if self.breaking is not None and body.get("stream"):
            return StreamingResponse(self._break_off(self.breaking), media_type="text/event-stream")
        self.delay = None if body.get("stream") else self.hold
        outputs = [self._naming("0"), self._naming(self.version)]
        return [[output] for output in outputs] if isinstance(body["text"], list) else outputs
