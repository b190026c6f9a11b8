"""A worker that names the version of its weights in what it answers, as SGLang does, and is updated by a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["Naming"]


class Naming:
    """``/generate`` names ``version``; what begins while ``hold`` is set ends with that, and names what was then.

    ``named``: what all its answers name instead. ``is_mute``: only its answers name a version. ``questions``: how
    often somebody has asked for it.
    """

    def __init__(self, version: str = "1") -> None:
        self.version = version
        self.named: str | None = None
        self.is_mute = False
        self.is_well = True
        self.hold: anyio.Event | None = None
        self.info_hold: anyio.Event | None = None
        self.generated = 0
        self.questions = 0
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/model_info", self._model_info),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/{path:path}", self._anything, methods=["GET", "POST"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.is_well else 503)

    async def _model_info(self, _: Request) -> Response:
        self.questions += 1
        if self.info_hold is not None:
            await self.info_hold.wait()
        return JSONResponse({} if self.is_mute else {"weight_version": self.version})

    async def _anything(self, _: Request) -> Response:
        return JSONResponse({"success": True, "message": "done"})

    async def _chat(self, _: Request) -> Response:
        return JSONResponse({"choices": [], "metadata": {"weight_version": self.version}})

    def _output(self, version: str) -> dict[str, Any]:
        version = self.named or version
        spans = [{"version": "0", "start": 0, "end": 1}, {"version": version, "start": 1, "end": 2}]
        meta = {"id": "r", "weight_version": version, "weight_versions": spans, "completion_tokens": 2}
        return {"text": 'a \\"weight_version\\":\\"9\\"', "output_ids": [1, 2], "meta_info": meta}

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.generated += 1
        version = self.version
        if body.get("stream"):
            return StreamingResponse(self._events(version, self.hold), media_type="text/event-stream")
        if self.hold is not None:
            await self.hold.wait()
        output = self._output(version)
        return JSONResponse([self._output("0"), output] if isinstance(body["text"], list) else output)

    async def _events(self, version: str, hold: anyio.Event | None) -> AsyncIterator[bytes]:
        yield b"data: " + orjson.dumps(self._output("0")) + b"\n\n"
        if hold is not None:  # what it was when the request came: its first event may be out later
            await hold.wait()
        yield b"data: " + orjson.dumps(self._output(version)) + b"\n\n"
        yield b"data: [DONE]\n\n"
