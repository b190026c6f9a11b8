"""Request ids: what ties a client's request to the router's log and to the engine's."""

from __future__ import annotations

import argparse
import re
from uuid import uuid4

from router_core.errors import SettingsError
from router_core.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["DEFAULT_HEADERS", "RequestIds", "add_request_id_options", "log_prefix", "request_id_headers"]

#: The names that gateways of inference servers read by default.
DEFAULT_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_ANSWER = b"x-request-id"
_KEY = "slime_router.request_id"
#: RFC 9110 section 5.6.2.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ID = re.compile(rb"[\x20-\x7e]{1,256}")


def add_request_id_options(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    parser.add_argument(
        "--request-id-headers",
        nargs="*",
        metavar="NAME",
        help="give each request an id: the first of these headers, or a new one"
        f" (default names: {' '.join(DEFAULT_HEADERS)})",
    )


def request_id_headers(options: argparse.Namespace) -> tuple[bytes, ...]:
    """Return the headers in which an id may come, in lower case; none: requests get no ids. Raises SettingsError."""
    names = options.request_id_headers
    if names is None:
        return ()
    for name in names:
        if not _NAME.fullmatch(name):
            raise SettingsError(f"--request-id-headers: wanted names of headers, got {name!r}")
    return tuple(name.lower().encode() for name in names or DEFAULT_HEADERS)


class RequestIds:
    """ASGI middleware around everything else but CORS: each request that gets here has an id.

    It is the first header of ``names`` that came with printable ASCII in it, 256 bytes at most. Without one, an id is
    made and added under the first name, so that the engine gets it. The client finds its id in ``x-request-id``;
    an engine's header of that name is left out.
    """

    def __init__(self, app: ASGIApp, names: tuple[bytes, ...]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        request_id = self._given(headers)
        if request_id is None:
            request_id = uuid4().hex.encode()
            made = self._names[0]
            headers = [*(pair for pair in headers if pair[0] != made), (made, request_id)]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = (pair for pair in message.get("headers", ()) if pair[0].lower() != _ANSWER)
                message = {**message, "headers": [*kept, (_ANSWER, request_id)]}
            await send(message)

        await self._app({**scope, "headers": headers, _KEY: request_id.decode()}, receive, named)

    def _given(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        for name in self._names:
            for key, value in headers:
                if key == name and _ID.fullmatch(value):
                    return value
        return None


def log_prefix(scope: Scope) -> str:
    """Return the beginning of a log line about a request: its id, if it has one."""
    request_id = scope.get(_KEY)
    return "" if request_id is None else f"[{request_id}] "
