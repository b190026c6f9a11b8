"""Error types. ``slime_http.errors`` has the errors of connections, and the JSON body of an error response.

::

    RouterError
    ├── StartupError            the router cannot start: one line on stderr, exit code 2
    │   ├── SettingsError
    │   ├── PluginError
    │   └── MissingComponent
    └── HTTPError               one request fails with ``status``
        ├── BadRequest          400
        │   └── TooManyValues
        ├── Aborted             400
        ├── Unauthorized        401
        ├── Forbidden           403
        ├── SessionNotFound     404
        ├── WorkerNotFound      404
        ├── MixedWorkers        409
        ├── PayloadTooLarge     413
        ├── PluginFailed        500
        ├── PluginNotLoaded     501
        ├── WorkerUnreachable   502   no connection (504: none within the deadline)
        ├── WorkerBroke         502   the connection or the protocol broke
        ├── NoWorker            503
        ├── ShuttingDown        503
        └── WorkerTimeout       504
"""

from __future__ import annotations

from slime_http.errors import (
    BadRequest,
    HTTPError,
    RouterError,
    StartupError,
    WorkerBroke,
    WorkerTimeout,
    WorkerUnreachable,
    error_body,
)

__all__ = [
    "Aborted", "BadRequest", "Forbidden", "HTTPError", "MissingComponent", "MixedWorkers", "NoWorker",
    "PayloadTooLarge", "PluginError", "PluginFailed", "PluginNotLoaded", "RouterError", "SessionNotFound",
    "SettingsError", "ShuttingDown", "StartupError", "TooManyValues", "Unauthorized", "WorkerBroke",
    "WorkerNotFound", "WorkerTimeout", "WorkerUnreachable", "error_body",
]  # fmt: skip


class SettingsError(StartupError):
    """The command line has an unknown flag or command, or a value that cannot work."""


class PluginError(StartupError):
    """A plugin cannot be loaded, fails at the start, or conflicts with another plugin."""


class MissingComponent(StartupError):
    """A required component is not registered."""


class TooManyValues(BadRequest):
    """The body has so many strings, lists and objects that it is not parsed."""


class Unauthorized(HTTPError):
    """The request has no key or token, or one that is not valid."""

    status, type, code = 401, "authentication_error", "UNAUTHORIZED"
    headers = ((b"www-authenticate", b"Bearer"),)


class Forbidden(HTTPError):
    """The key or token does not permit the request, or the request may come from a web page of another site."""

    status, type, code = 403, "permission_error", "FORBIDDEN"


class SessionNotFound(HTTPError):
    """The session is unknown, or it was deleted."""

    status, type, code = 404, "not_found_error", "SESSION_NOT_FOUND"


class WorkerNotFound(HTTPError):
    """No worker with that URL or id is registered."""

    status, type, code = 404, "not_found_error", "WORKER_NOT_FOUND"


class MixedWorkers(HTTPError):
    """A router that has passthrough workers, to which it only proxies, cannot have workers of other types."""

    status, type, code = 409, "conflict_error", "MIXED_WORKERS"


class Aborted(HTTPError):
    """The request was aborted while it waited for a slot or for the end of a pause, or before another attempt."""

    status, type, code = 400, "invalid_request_error", "ABORTED"


class PayloadTooLarge(HTTPError):
    """The body is larger than ``--max-payload-size``."""

    status, type, code = 413, "invalid_request_error", "PAYLOAD_TOO_LARGE"


class PluginFailed(HTTPError):
    """A plugin raised, or gave an invalid result. The client gets no tokens: wrong training data would be worse."""

    type, code = "plugin_error", "PLUGIN_FAILED"

    def __init__(self, plugin: str, hook: str) -> None:
        super().__init__(f"plugin {plugin!r} failed in {hook}; the router's log has the traceback")
        self.plugin = plugin
        self.hook = hook


class PluginNotLoaded(HTTPError):
    """The request needs a plugin that is not loaded."""

    status, type, code = 501, "not_implemented_error", "PLUGIN_NOT_LOADED"


class NoWorker(HTTPError):
    """No worker can take the request now."""

    status, type, code = 503, "service_unavailable", "NO_WORKER"


class ShuttingDown(HTTPError):
    """The router is shutting down: the request was still waiting, or it outlasted the grace period."""

    status, type, code = 503, "service_unavailable", "SHUTTING_DOWN"
