"""Errors of a request, each with the parameter at fault, and OpenAI's error body for any error.

::

    BadRequest (router_core)         400
    └── InvalidRequest               an invalid value; ``param`` names the parameter
        ├── MissingParameter         a required parameter is missing
        ├── UnknownParameter         the router does not know the parameter; its name may be misspelt
        └── UnsupportedParameter     OpenAI or SGLang has the parameter, but the router cannot honour it
"""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from router_core.errors import BadRequest, HTTPError

__all__ = [
    "InvalidRequest",
    "MissingParameter",
    "UnknownParameter",
    "UnsupportedParameter",
    "error_body",
    "error_object",
    "wrong",
]

#: The most characters that a message shows of a string value, or of an unknown parameter's name.
_SHOWN = 80
_MOST_NAMED = 16
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class InvalidRequest(BadRequest):
    """An invalid value. ``param``: its path in OpenAI's form, ``messages.[2].content``; None: the whole body."""

    code = "invalid_value"

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class MissingParameter(InvalidRequest):
    """A required parameter that is missing or null."""

    code = "missing_required_parameter"

    def __init__(self, param: str, wanted: str) -> None:
        super().__init__(param, f"Missing required parameter: '{param}'; wanted {wanted}.")


class UnknownParameter(InvalidRequest):
    """One or more parameters that the router does not know; ``param`` is the first."""

    code = "unknown_parameter"

    def __init__(self, *params: str) -> None:
        shown = [param[:_SHOWN] for param in params[:_MOST_NAMED]]
        word = "parameter" if len(params) == 1 else "parameters"
        names = ", ".join(f"'{name}'" for name in shown)
        more = f", and {len(params) - len(shown)} more" if len(params) > len(shown) else ""
        super().__init__(shown[0], f"Unknown {word}: {names}{more}.")


class UnsupportedParameter(InvalidRequest):
    """A known parameter that cannot be honoured. ``why``: the reason, and what to do instead."""

    code = "unsupported_parameter"

    def __init__(self, param: str, why: str) -> None:
        super().__init__(param, f"Unsupported parameter: '{param}': {why}.")


def wrong(param: str | None, wanted: str, value: object) -> InvalidRequest:
    """Return the error for a ``value`` that is not what was ``wanted``."""
    place = "the body" if param is None else f"'{param}'"
    return InvalidRequest(param, f"Invalid value for {place}: wanted {wanted}, got {_shown(value)}.")


def _shown(value: object) -> str:
    """Return ``value`` for an error message. A long string is cut; a list or an object is described, not shown."""
    if isinstance(value, list | array):
        return f"a list of length {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    return "null" if value is None else repr(value).lower()  # JSON's true and false


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's ``{"error": {...}}``; its type follows from the HTTP ``status``."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: HTTPError) -> bytes:
    """Return the JSON body of the reply to a request that failed with ``error``."""
    param = error.param if isinstance(error, InvalidRequest) else None
    return orjson.dumps(error_object(error.status, str(error), param=param, code=error.code))
