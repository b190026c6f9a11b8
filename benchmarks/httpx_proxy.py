"""A plain proxy of Starlette and httpx, like most Python routers. The router is compared with it.

The variable ``WORKER_URL`` names the worker. Run the proxy with ``uvicorn benchmarks.httpx_proxy:app``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

__all__ = ["app"]

_HOP_BY_HOP = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    url = os.environ["WORKER_URL"]
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False) as client:
        app.state.client = client
        yield


async def _forward(request: Request) -> StreamingResponse:
    client: httpx.AsyncClient = request.app.state.client
    headers = [(name, value) for name, value in request.headers.items() if name not in _HOP_BY_HOP]
    url = httpx.URL(path=request.url.path, query=request.url.query.encode() or None)
    upstream = client.build_request(request.method, url, headers=headers, content=await request.body())
    reply = await client.send(upstream, stream=True)
    return StreamingResponse(
        reply.aiter_raw(),
        status_code=reply.status_code,
        headers={name: value for name, value in reply.headers.items() if name not in _HOP_BY_HOP},
        background=BackgroundTask(reply.aclose),
    )


app = Starlette(routes=[Route("/{path:path}", _forward, methods=["GET", "POST"])], lifespan=_lifespan)
