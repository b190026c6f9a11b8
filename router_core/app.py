"""The ASGI application: serves the router's own routes, and sends all other requests to the proxy.

Starlette serves the routes of the core and of the plugins, and runs the lifespan. A request whose path can
match no route bypasses Starlette: even with one route, Starlette's routing would take a quarter of the request's time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from router_core.admin import admin_routes
from router_core.client import Watched, read_body, send_error
from router_core.errors import BadRequest, HTTPError, PayloadTooLarge, PluginError, ShuttingDown, error_body
from router_core.exchange import Exchange
from router_core.proxy import relay
from router_core.request import Request
from router_core.request_ids import log_prefix
from router_core.router import Router
from router_core.routes import ControlRoute
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_http.asgi import EXPLAIN, note_failure, take_whole
from slime_http.message_faults import reply_fault

__all__ = ["make_app"]

logger = logging.getLogger(__name__)

_PARAMETER = re.compile(r"{[^}]*}")
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


def make_app(router: Router, middleware: Iterable[Callable[..., Any]] = ()) -> ASGIApp:
    """Make the application of ``router``, with layers of ``middleware``: the first item is the outermost of them.

    Each item is called with ``(app, router=router)``. Then the plugins' hook ``asgi_middleware`` wraps the result.
    Raises PluginError for a route that is claimed twice, or that is neither a Route nor a Mount.
    """
    inner = _App(router)
    app: ASGIApp = inner
    for kind in [*middleware][::-1]:
        app = kind(app, router=router)
    for _, wrap in router.hooks.asgi_middleware[::-1]:
        app = wrap(app, router)
    return app


class _App:
    def __init__(self, router: Router) -> None:
        self._router = router
        claimed: list[tuple[str, BaseRoute]] = [("the core", route) for route in admin_routes(router)]
        for plugin, routes in router.hooks.routes:
            claimed += [(f"plugin {plugin!r}", route) for route in routes(router)]
        self._exact, self._prefixes = _table(claimed)
        router.own_paths = [
            (route.path_regex, isinstance(route, ControlRoute))
            for _, route in claimed
            if isinstance(route, Route | Mount)
        ]
        self._own = Starlette(
            routes=[route for _, route in claimed],
            lifespan=lambda _: router.running(),
            exception_handlers={
                HTTPError: _http_error,
                HTTPException: _starlette_error,
                Exception: self._crash,
            },
        )
        self._own.router.redirect_slashes = False
        self._own.router.default = self._proxied

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            scope.get("state", {})[EXPLAIN] = self._router.hooks.unexpected
            return self._own(scope, receive, send)
        path: str = scope["path"]
        if path not in self._exact and not path.startswith(self._prefixes):
            return self._proxied(scope, receive, send)
        return self._answered(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "\n" in scope["path"]:  # Starlette would match no route, and a worker would get the request
            await send_error(BadRequest("the path has a line break in it"), send)
            return
        try:
            await self._own(scope, self._bounded(receive), send)
        except ClientDisconnect:
            return  # the client has hung up
        except Exception:
            # Unless the response had begun, Starlette has sent a 500. Raising again would close the connection.
            logger.exception("%s%s failed", log_prefix(scope), scope["path"])

    async def _crash(self, request: StarletteRequest, error: Exception) -> Response:
        found = self._router.hooks.unexpected(error, by=request.scope.get("endpoint"))
        return _json_error(500, error_body(found))

    def _bounded(self, receive: Receive) -> Receive:
        """Wrap ``receive`` so that it raises PayloadTooLarge for a body above the limit."""
        limit = self._router.settings.max_payload_size
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise PayloadTooLarge(f"the request body is larger than {limit} bytes (--max-payload-size)")
            return message

        return counted

    async def _proxied(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, request, reply, raw = self._router, None, None, scope["raw_path"]
        try:
            headers, limit = scope["headers"], router.settings.max_payload_size
            body = take_whole(receive, limit)
            if body is None:
                try:
                    body = await read_body(headers, receive, limit)
                except PayloadTooLarge as error:
                    await send_error(error, send, unread=receive)
                    return
            target = raw + b"?" + query if (query := scope["query_string"]) else raw
            request = Request(scope["method"], target, headers, body)
            address, _ = scope.get("client") or (None, 0)
            exchange = Exchange(request, sources=router.session_sources, address=address, scope=scope)
            with Watched((router._life or router._serving).clients, receive, exchange) as watched:
                reply = await router.respond(exchange)
                if (rest := relay(reply, scope["method"], send, watched.end)) is not None:
                    await rest
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if reply is not None:
                note_failure(scope, ShuttingDown.code)
                raise
            # The grace period is over. Raising again would make some servers log a traceback for each request.
            await send_error(ShuttingDown("the router is shutting down"), send)
        except HTTPError as error:
            if reply is not None:
                # The server closes the connection early, so the client sees that the body is incomplete.
                logger.warning("%sa reply broke off: %s", log_prefix(scope), error)
                note_failure(scope, error.code)
                return
            if error.status >= 500:
                # The log gets the raw path, since the decoded path may have line breaks.
                path, prefix = raw.decode("latin-1"), log_prefix(scope)
                logger.warning("%s%s %s: %d, %s", prefix, scope["method"], path, error.status, error)
            await send_error(error, send)
        except Exception as error:
            logger.exception("%sa request failed", log_prefix(scope))
            if reply is not None and reply_fault(reply.status, reply.headers) is None:
                raise  # the server knows whether the client has got a part of the reply
            await send_error(router.hooks.unexpected(error, request, reply), send)


def _json_error(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


async def _http_error(_: StarletteRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPError)  # narrowing: registered for this type
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in error.headers}
    return _json_error(error.status, error_body(error), headers)


async def _starlette_error(_: StarletteRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # narrowing: registered for this type
    allowed = (error.headers or {}).get("Allow")
    message = f"{error.detail}: wanted {allowed}" if allowed else error.detail
    content = {"message": message, "type": "invalid_request_error", "code": f"HTTP_{error.status_code}"}
    headers = dict(error.headers) if error.headers else None
    return _json_error(error.status_code, orjson.dumps({"error": content}), headers)


def _table(claimed: Sequence[tuple[str, BaseRoute]]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the exact paths, and the prefixes of mounts and of paths with parameters. Raises PluginError."""
    exact: set[str] = set()
    prefixes: set[str] = set()
    for number, (owner, route) in enumerate(claimed):
        if not isinstance(route, Route | Mount):
            raise PluginError(f"{owner} offers a {type(route).__name__}; routes must be Route or Mount")
        for other, earlier in claimed[:number]:
            assert isinstance(earlier, Route | Mount)  # narrowing: checked in an earlier iteration
            both = _methods(route) & _methods(earlier)
            same = _PARAMETER.sub("{}", earlier.path) == _PARAMETER.sub("{}", route.path)
            # The route /workers/{id} answers requests for /workers/mine, too.
            if both and (same or earlier.path_regex.match(route.path)):
                raise PluginError(f"{owner} and {other} both claim the route {min(both)} {route.path}")
        literal, parameter, _ = route.path.partition("{")
        if isinstance(route, Mount):
            exact.add(route.path)
            prefixes.add(route.path + "/")
        elif parameter:
            prefixes.add(literal)
        else:
            exact.add(route.path)
    return frozenset(exact), tuple(prefixes)


def _methods(route: Route | Mount) -> frozenset[str]:
    return frozenset((isinstance(route, Route) and route.methods) or _METHODS)
