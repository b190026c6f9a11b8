"""Errors of one request, and their JSON form."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson

__all__ = [
    "BadRequest",
    "HTTPError",
    "RouterError",
    "StartupError",
    "WorkerBroke",
    "WorkerTimeout",
    "WorkerUnreachable",
    "error_body",
]


class RouterError(Exception):
    """Base of most errors that the router raises on purpose."""


class StartupError(RouterError):
    """A reason why the router cannot start. The message is one line: what was wanted, what was found."""


class HTTPError(RouterError):
    """An error that the client gets as an answer with ``status`` and the message as JSON."""

    status: int = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "INTERNAL_ERROR"
    #: Further headers of the answer, names in lower case.
    headers: tuple[tuple[bytes, bytes], ...] = ()


class BadRequest(HTTPError):
    """An invalid request. A retry cannot succeed."""

    status, type, code = 400, "invalid_request_error", "BAD_REQUEST"


class WorkerUnreachable(HTTPError):
    """A failed attempt to connect: the worker got no request. ``status`` is 504 after a timeout, else 502."""

    status, type, code = 502, "bad_gateway", "WORKER_UNREACHABLE"

    def __init__(self, message: str, *, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class WorkerBroke(HTTPError):
    """A connection that the worker closed, or a protocol error. ``answered``: the answer's first byte had come."""

    status, type, code = 502, "bad_gateway", "WORKER_BROKE"

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class WorkerTimeout(HTTPError):
    """An answer that did not begin, or did not go on, before the deadline."""

    status, type, code = 504, "gateway_timeout", "WORKER_TIMEOUT"


def error_body(error: HTTPError) -> bytes:
    """Return ``{"error": {"message", "type", "code"}}``, which OpenAI's clients can read too."""
    content: dict[str, Any] = {"message": str(error), "type": error.type, "code": error.code}
    return orjson.dumps({"error": content})
