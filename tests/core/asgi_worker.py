"""A worker for servers that speak ASGI: every shape of answer, by path. ``aiohttp_worker`` is its twin."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["EVENTS", "app", "make_app"]

#: Pieces that ``/events`` sends, one for each ``/next``.
EVENTS = [b"data: one\n\n", b"data: two\ndata: three\n\n", b"data: [DONE]\n\n"]


async def seen(request: Request) -> Response:
    """Return the request that arrived: method, target, headers, and the size of the body."""
    target: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    body = await request.body()
    return JSONResponse(
        {
            "method": request.method,
            "target": (target + b"?" + query if query else target).decode("latin-1"),
            "headers": [
                [name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers.raw
            ],
            "body_bytes": len(body),
        }
    )


async def peer(request: Request) -> Response:
    """The port that the request came from: it tells connections apart."""
    assert request.client is not None
    return Response(str(request.client.port))


async def echo(request: Request) -> Response:
    """The body, with its length."""
    return Response(await request.body(), media_type="application/octet-stream")


async def chunked(request: Request) -> Response:
    """The body in pieces, without a length."""
    body = await request.body()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    return StreamingResponse(pieces())


async def status(request: Request) -> Response:
    """An answer of the status in the path."""
    number: int = request.path_params["number"]
    return Response(
        b"" if number in (204, 304) else b'{"error": {"message": "no"}}', number, {"x-status": "s"}
    )


async def twice(_: Request) -> Response:
    """Headers that come twice, in an order."""
    response = Response(b"twice")
    response.raw_headers += [
        (b"set-cookie", b"a=1; Path=/"),
        (b"x-a", b"first"),
        (b"set-cookie", b"b=2, 3"),
        (b"x-a", b"second"),
        (b"x-latin", "é".encode("latin-1")),
    ]
    return response


def make_app() -> Starlette:
    """A worker of its own state: how many events may be sent."""
    allowed = 0

    async def events(_: Request) -> Response:
        nonlocal allowed
        allowed = 0

        async def gated() -> AsyncIterator[bytes]:
            for number, event in enumerate(EVENTS):
                while allowed <= number:  # noqa: ASYNC110  # the asker may be in another thread
                    await anyio.sleep(0.002)
                yield event

        return StreamingResponse(gated(), media_type="text/event-stream")

    async def next_event(_: Request) -> Response:
        nonlocal allowed
        allowed += 1
        return Response(b"")

    return Starlette(
        routes=[
            Route("/events", events),
            Route("/next", next_event),
            Route("/peer", peer),
            Route("/echo", echo, methods=["GET", "POST", "PUT"]),
            Route("/chunked", chunked, methods=["GET", "POST"]),
            Route("/status/{number:int}", status, methods=["GET", "POST"]),
            Route("/twice", twice),
            Route("/{path:path}", seen, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
        ]
    )


app = make_app()
