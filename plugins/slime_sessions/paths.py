"""ASGI middleware that serves ``/sessions/{id}/v1/...`` as ``/v1/...`` with that session."""

from __future__ import annotations

from collections.abc import Awaitable
from urllib.parse import unquote

from router_core.client import send_error
from router_core.errors import HTTPError
from router_core.proxy import PATH
from router_core.types import ASGIApp, Receive, Scope, Send
from slime_sessions.errors import NothingThere
from slime_sessions.names import PREFIX, read_path

__all__ = ["SessionPaths"]

_HEADER = b"x-session-id"
_SAMPLES = "/samples"
#: Methods of the routes on a session itself.
_OWN_METHODS = ("GET", "HEAD", "DELETE")


class SessionPaths:
    """Moves the session from the path to ``X-Session-Id``.

    This happens before authorization, routes, plugins and workers see the request. The session in the path replaces the
    client's own ``X-Session-Id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            try:
                scope = _rewritten(scope)
            except HTTPError as error:
                return send_error(error, send, unread=receive)
        return self._app(scope, receive, send)


def _rewritten(scope: Scope) -> Scope:
    """Return ``scope`` with the session moved from its path to a header. Raises BadRequest, NothingThere."""
    found = read_path(scope["raw_path"])
    if found is None:
        path: str = scope["path"]
        is_own = scope["method"] in _OWN_METHODS or "/" not in path[len(PREFIX) :] or path.endswith(_SAMPLES)
        if is_own:  # the routes answer other methods with a 405
            return scope
        raise NothingThere("below /sessions/{id} there are /v1/..., /generate and /samples")
    name = found.name.encode()
    path = unquote(found.rest.decode("latin-1"))
    scope.setdefault("state", {})[PATH] = path
    return {
        **scope,
        "path": path,
        "raw_path": found.rest,
        "headers": [(_HEADER, name), *(pair for pair in scope["headers"] if pair[0] != _HEADER)],
    }
