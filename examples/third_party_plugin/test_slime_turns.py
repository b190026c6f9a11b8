"""The plugin in a real router with a real worker, in one process and on free ports."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from router_core.cli import build
from router_core.serving import serving


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"turn_seen_by_worker": request.headers.get("x-turn")})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_session_ends_after_its_turns() -> None:
    engine = Starlette(routes=[Route("/generate", echo, methods=["POST"])])
    async with serving(engine) as worker:
        _, router = build(["--plugin", "turns", "--max-turns", "2", "--worker-urls", worker])
        async with serving(router) as url, httpx.AsyncClient(base_url=url) as client:
            ada = {"x-session-id": "ada"}
            for turn in ("1", "2"):
                answer = await client.post("/generate", json={"text": "Hi"}, headers=ada)
                assert answer.json() == {"turn_seen_by_worker": turn}
                assert answer.headers["x-turn"] == turn

            refused = await client.post("/generate", json={"text": "Hi"}, headers=ada)
            assert refused.status_code == 400
            assert "2 turns" in refused.json()["error"]["message"]
            assert (await client.get("/turns")).json() == {"turns": {"ada": 2}, "max_turns": 2}
