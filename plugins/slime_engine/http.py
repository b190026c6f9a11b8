"""Helpers that the routes share: JSON in and out, server-sent events, and detection of a client's disconnect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router_core.types import Receive, Scope, Send
from slime_engine.errors import BadRequest, EngineError

__all__ = ["EventStream", "JSONBytes", "error_response", "json_body", "unless_gone"]

T = TypeVar("T")

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class JSONBytes(Response):
    """JSON by orjson; each double reads back as the same double."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_body(error: EngineError, path: str) -> dict[str, Any]:
    """Return SGLang's error body: flat under ``/v1``, and within ``error`` elsewhere."""
    if path.startswith("/v1/"):
        return {
            "object": "error",
            "message": str(error),
            "type": error.kind,
            "param": None,
            "code": error.status,
        }
    return {"error": {"message": str(error)}}


def error_response(request: Request, error: Exception) -> Response:
    """Return the response for an EngineError that a route raised. Starlette calls this."""
    assert isinstance(error, EngineError), "this handler is registered for EngineError"
    return JSONBytes(error_body(error, request.url.path), status_code=error.status)


async def json_body(request: Request, *, required: bool = True) -> dict[str, Any]:
    """Return the request's JSON object; an empty body is ``{}`` unless ``required``. Raises BadRequest."""
    raw = await request.body()
    if not raw and not required:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``work``. When the client hangs up, cancel ``work`` and raise ClientDisconnect."""
    outcome: list[T] = []
    failure: Exception = ClientDisconnect()

    async def watch() -> None:
        await receive()  # the body has been read, so this is the disconnect
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            outcome.append(await work())
        except EngineError as error:
            failure = error  # raised below, outside the task group, which would wrap it
        tasks.cancel_scope.cancel()
    if not outcome:
        raise failure
    return outcome[0]


class EventStream(Response):
    """``events`` as server-sent events, then ``[DONE]``.

    An EngineError before the first event becomes an ordinary error response. A later EngineError becomes an event.
    """

    def __init__(self, events: AsyncIterator[Mapping[str, Any]]) -> None:
        self._events = events
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, lambda: self._send_all(send, scope["path"]))
        except ClientDisconnect:
            return
        except EngineError as error:
            body = JSONBytes(error_body(error, scope["path"]), status_code=error.status)
            await body(scope, receive, send)

    async def _send_all(self, send: Send, path: str) -> None:
        async def send_event(data: bytes) -> None:
            chunk = b"data: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        started = False
        async with aclosing(self._events) as events:  # type: ignore[type-var]  # all are generators
            try:
                async for event in events:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
                    await send_event(orjson.dumps(event))
            except EngineError as error:
                if not started:
                    raise
                body = error_body(error, path)
                await send_event(orjson.dumps({"error": body.get("error", body)}))
        await send_event(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
