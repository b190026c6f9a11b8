"""Error types. Those of a connection, and how a client is told, are in ``slime_http.errors``.

::

    RouterError
    ├── StartupError            the command line cannot work: one line on stderr, exit code 2
    │   ├── SettingsError
    │   ├── PluginError
    │   └── MissingComponent
    └── HTTPError               one request fails with ``status``
        ├── BadRequest          400
        │   └── TooManyValues
        ├── Aborted             400
        ├── WorkerRefused       400
        ├── Unauthorized        401
        ├── Forbidden           403
        ├── WorkerNotFound      404
        ├── MixedWorkers        409
        ├── PayloadTooLarge     413
        ├── UnsupportedMediaType  415
        ├── PluginFailed        500
        ├── WorkerUnreachable   502   no connection (504: not in time)
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
    "Aborted",
    "BadRequest",
    "Forbidden",
    "HTTPError",
    "MissingComponent",
    "MixedWorkers",
    "NoWorker",
    "PayloadTooLarge",
    "PluginError",
    "PluginFailed",
    "RouterError",
    "SettingsError",
    "ShuttingDown",
    "StartupError",
    "TooManyValues",
    "Unauthorized",
    "UnsupportedMediaType",
    "WorkerBroke",
    "WorkerNotFound",
    "WorkerRefused",
    "WorkerTimeout",
    "WorkerUnreachable",
    "error_body",
]


class SettingsError(StartupError):
    """A flag has a value that cannot work."""


class PluginError(StartupError):
    """A plugin cannot be loaded, or two of them do not fit together."""


class MissingComponent(StartupError):
    """A component that is asked for is not registered."""


class TooManyValues(BadRequest):
    """The body has so many strings, lists and objects that it is not parsed."""


class Unauthorized(HTTPError):
    """No key of the router's came with the request, or none that it knows."""

    status, type, code = 401, "authentication_error", "UNAUTHORIZED"
    headers = ((b"www-authenticate", b"Bearer"),)


class Forbidden(HTTPError):
    """The key is one of the router's, and opens less."""

    status, type, code = 403, "permission_error", "FORBIDDEN"


class UnsupportedMediaType(HTTPError):
    """The path takes no body of this ``Content-Type``."""

    status, type, code = 415, "invalid_request_error", "UNSUPPORTED_MEDIA_TYPE"


class WorkerNotFound(HTTPError):
    """No worker with that URL or id is registered."""

    status, type, code = 404, "not_found_error", "WORKER_NOT_FOUND"


class MixedWorkers(HTTPError):
    """Workers that are only proxied to, and others, cannot be behind one router."""

    status, type, code = 409, "conflict_error", "MIXED_WORKERS"


class WorkerRefused(HTTPError):
    """The server at that URL is no engine that the router can use."""

    status, type, code = 400, "invalid_request_error", "WORKER_REFUSED"


class Aborted(HTTPError):
    """Somebody asked to end the request before an engine had it; asking again was not wanted."""

    status, type, code = 400, "invalid_request_error", "ABORTED"


class PayloadTooLarge(HTTPError):
    """The body is larger than ``--max-payload-size``."""

    status, type, code = 413, "invalid_request_error", "PAYLOAD_TOO_LARGE"


class PluginFailed(HTTPError):
    """A plugin raised; no answer is better than wrong training data."""

    type, code = "plugin_error", "PLUGIN_FAILED"

    def __init__(self, plugin: str, hook: str) -> None:
        super().__init__(f"plugin {plugin!r} failed in {hook}; the router's log has the traceback")
        self.plugin = plugin
        self.hook = hook


class NoWorker(HTTPError):
    """No worker can take the request now."""

    status, type, code = 503, "service_unavailable", "NO_WORKER"


class ShuttingDown(HTTPError):
    """The router was told to end, and the request outlasted the grace period."""

    status, type, code = 503, "service_unavailable", "SHUTTING_DOWN"
