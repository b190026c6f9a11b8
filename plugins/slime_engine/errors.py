"""Errors of the engine, each with the HTTP status that it becomes.

EngineError
├── BadRequest    400  the client's fault: told once and clearly
├── NotServed     501  a call of SGLang's that this engine does not have
├── Unavailable   503  starting, or ending
└── Crashed       500  the scheduler died; nothing will be generated any more
"""

from __future__ import annotations

__all__ = ["BadRequest", "Crashed", "EngineError", "NotServed", "Unavailable"]


class EngineError(Exception):
    """``str(error)`` is the message that the client reads."""

    status = 500
    kind = "InternalServerError"


class BadRequest(EngineError):
    """The request cannot be served as it is."""

    status = 400
    kind = "BadRequestError"


class NotServed(EngineError):
    """SGLang has this call, and the embedded engine does not."""

    status = 501
    kind = "NotImplementedError"


class Unavailable(EngineError):
    """The engine is starting or ending; another worker may help."""

    status = 503
    kind = "ServiceUnavailable"


class Crashed(EngineError):
    """The scheduler has crashed; the message says why."""
