"""Request ids: the same id in a client's request, in the router's log and in the engine's log."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from os import urandom
from typing import Any

from router_core.errors import SettingsError
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from slime_http.asgi import send_now_of

__all__ = [
    "DEFAULT_HEADERS",
    "RequestIds",
    "log_prefix",
    "request_id_headers",
    "request_id_of",
]

#: Headers in which gateways of inference servers look for an id by default.
DEFAULT_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_ANSWER = b"x-request-id"
_KEY = "slime_router.request_id"
#: The name of a header: a token, RFC 9110 section 5.6.2.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ID = re.compile(rb"[\x20-\x7e]{1,256}")


def request_id_headers(names: Sequence[str] | None) -> tuple[bytes, ...]:
    """Return the names of headers that may carry an id, in lower case. Raises SettingsError.

    ``names``: the values of ``--request-id-headers``. If it is None, since the flag is not given, no name is returned.
    """
    if names is None:
        return ()
    for name in names:
        if not _NAME.fullmatch(name):
            raise SettingsError(f"--request-id-headers: wanted names of headers, got {name!r}")
    return tuple(name.lower().encode() for name in names or DEFAULT_HEADERS)


class RequestIds:
    """ASGI middleware that gives each request an id.

    The id is the value of the first header of ``names`` that has 1 to 256 printable ASCII characters. Without such a
    header, an id is made and sent to the engine under the first name. The client gets the id as ``x-request-id``, in
    place of the engine's header of that name.
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
            request_id = urandom(16).hex().encode()
            made = self._names[0]
            headers = [*[pair for pair in headers if pair[0] != made], (made, request_id)]
        named = _Named(send, request_id)
        await self._app({**scope, "headers": headers, _KEY: request_id.decode()}, receive, named.send)

    def _given(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        names = self._names
        valid = [pair for pair in headers if pair[0] in names and _ID.fullmatch(pair[1])]
        return min(valid, key=lambda pair: names.index(pair[0]))[1] if valid else None


class _Named:
    """Wraps ``send`` so that the answer has the id. ``send_now``: the server's function of that name, or None."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._id = request_id
        self.send_now = send_now_of(send)

    def send(self, message: Message) -> Awaitable[Any]:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message.get("headers", ()) if pair[0].lower() != _ANSWER]
            message = {**message, "headers": [*kept, (_ANSWER, self._id)]}
        return self._send(message)


def request_id_of(scope: Scope) -> str | None:
    """Return the id of a request, if it has one."""
    found: str | None = scope.get(_KEY)
    return found


def log_prefix(scope: Scope) -> str:
    """Return the beginning of a log line about a request: its id, if it has one."""
    request_id = request_id_of(scope)
    return "" if request_id is None else f"[{request_id}] "
