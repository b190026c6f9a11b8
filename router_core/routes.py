"""Helpers for routes of the core and of plugins: control routes, JSON bodies and JSON responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core.errors import BadRequest

__all__ = ["JSON", "ControlRoute", "by_method", "json_object", "parsed_object", "shown"]


class ControlRoute(Route):
    """A route that changes or shows workers. If the router has keys, most such routes need a key for control calls."""


def by_method(path: str, **endpoints: Callable[[Request], Awaitable[Response]]) -> ControlRoute:
    """Make one control route for all methods of ``path``, so that a 405 names each of them."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return ControlRoute(path, endpoint, methods=list(endpoints))


class JSON(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def json_object(request: Request) -> dict[str, Any]:
    """Return the request's body, a JSON object; ``{}`` when it is empty. Raises BadRequest."""
    body = await request.body()
    return parsed_object(body) if body.strip() else {}


def parsed_object(body: bytes) -> dict[str, Any]:
    """Parse ``body``, a JSON object. Raises BadRequest."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadRequest(f"wanted a JSON object, got {type(content).__name__}")
    return content


def shown(value: object) -> str:
    """Return the repr of ``value``, cut to fit into a message; for a dict or a list, the name of its type."""
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]
