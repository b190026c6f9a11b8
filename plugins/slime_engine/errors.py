"""Errors of the engine, each with the HTTP status that it becomes.

EngineError
├── BadRequest    400  the client's fault
├── NotServed     501  a call of SGLang's that this engine does not have
├── Unavailable   503  the engine is starting, is ending or has crashed, or its health check timed out
└── Crashed       500  the engine crashed during the request, or the prefill engine did not hand over
"""

from __future__ import annotations

__all__ = ["BadRequest", "Crashed", "EngineError", "NotServed", "Unavailable"]


class EngineError(Exception):
    """A failed request. ``str(error)`` is the message that the client reads."""

    status = 500
    kind = "InternalServerError"


class BadRequest(EngineError):
    """The request cannot be served as it is."""

    status = 400
    kind = "BadRequestError"


class NotServed(EngineError):
    """SGLang has this call, but the embedded engine does not."""

    status = 501
    kind = "NotImplementedError"


class Unavailable(EngineError):
    """The engine cannot serve now; another worker may."""

    status = 503
    kind = "ServiceUnavailable"


class Crashed(EngineError):
    """A request failed inside the engine; the message says why."""
