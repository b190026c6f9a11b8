"""Errors of one request, and how a client is told."""

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
    """Base of all errors that the router raises on purpose."""


class StartupError(RouterError):
    """The router cannot start as asked. The message is one line: what was wanted, what is known."""


class HTTPError(RouterError):
    """A request that ends with ``status`` and the message as JSON."""

    status: int = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "INTERNAL_ERROR"
    #: Further headers of the answer, names in lower case.
    headers: tuple[tuple[bytes, bytes], ...] = ()


class BadRequest(HTTPError):
    """The client's fault; asking again will not help."""

    status, type, code = 400, "invalid_request_error", "BAD_REQUEST"


class WorkerUnreachable(HTTPError):
    """The worker refused the connection, or its name or certificate is no good: it got nothing. 504: not in time."""

    status, type, code = 502, "bad_gateway", "WORKER_UNREACHABLE"

    def __init__(self, message: str, *, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class WorkerBroke(HTTPError):
    """The worker closed the connection or broke the protocol. ``answered``: after its first byte."""

    status, type, code = 502, "bad_gateway", "WORKER_BROKE"

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class WorkerTimeout(HTTPError):
    """The worker did not answer or go on within its deadline."""

    status, type, code = 504, "gateway_timeout", "WORKER_TIMEOUT"


def error_body(error: HTTPError) -> bytes:
    """``{"error": {"message", "type", "code"}}``, the shape OpenAI's clients read too."""
    content: dict[str, Any] = {"message": str(error), "type": error.type, "code": error.code}
    return orjson.dumps({"error": content})
