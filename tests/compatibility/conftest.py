"""Workers of the routers that launch lines start."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from slime_http.serving import serving


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    return JSONResponse({"path": request.url.path, "text": json.loads(body)["text"] if body else None})


#: A worker that says what it was asked.
ECHO = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])


@pytest.fixture
async def workers() -> AsyncIterator[dict[str, str]]:
    """The addresses of the published lines, and where a worker is."""
    names = [
        f"http://{kind}{number}:800{kind == 'decode':d}"
        for kind in ("prefill", "decode")
        for number in (1, 2)
    ]
    async with AsyncExitStack() as stack:
        one, two, *pairs = [await stack.enter_async_context(serving(ECHO)) for _ in range(6)]
        yield {
            "http://worker1:8000": one,
            "http://worker2:8001": two,
            "http://worker2:8000": two,
            **dict(zip(names, pairs, strict=True)),
        }
