"""Plugins of other people keep working: each hook and object of the first page on hooks is still there."""

from __future__ import annotations

import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compatibility.first_plugin import First
from deadlines import until
from routers import Start
from slime_http.serving import serving

PLUGIN = ("--middleware-paths", "compatibility.first_plugin")


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"header": request.headers.get("x-first"), "body": await request.json()})


async def healthy(_: Request) -> Response:
    return Response()


WORKER = Starlette(routes=[Route("/health", healthy), Route("/generate", echo, methods=["POST"])])


@pytest.mark.anyio
async def test_plugin_for_the_first_hooks_runs_unchanged(start: Start) -> None:
    async with (
        serving(WORKER) as worker,
        start(*PLUGIN, "--first-limit", "2", "--worker-urls", worker) as running,
    ):
        client = running.client
        plugin: First = running.router.components.get("first")
        assert (await client.get("/first/seen")).json()["seen"] == ["watching", [worker, "added"]]
        answer = await client.post("/generate", json={"text": "Hi"}, headers={"x-session-id": "ada"})
        assert answer.headers["x-first"] == "'ada'"
        assert answer.content.endswith(b"}\n")
        told = answer.json()
        assert told["header"] == "1"
        assert told["body"]["text"] == "Hi"
        assert told["body"]["first"] == "POST"
        assert (await client.get("/first/ask")).json()["body"]["text"] == "own"
        refused = await client.post("/generate", json={"text": "Hi"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")

        assert (await client.post("/weight_version", json={"weight_version": "7"})).is_success
        assert (await client.get("/first/seen")).json()["versions"][-1] == "7"
        assert (await client.post("/remove_worker", params={"url": worker})).is_success
        await until(lambda: plugin.seen.count("closed") == 2)
        assert [each for each in plugin.seen if isinstance(each, list)] == [
            [worker, "added"],
            [None, "7", "announced"],
            [worker, "removed"],
        ]
        told_to_tap = plugin.seen.index(True)  # the end of the first answer
        assert json.loads(plugin.seen[told_to_tap - 1]) == told
