"""Errors of a request, with the parameter at fault; OpenAI's error body for them and for every other failure.

::

    BadRequest (router_core)         400
    └── InvalidRequest               a value that cannot be; ``param`` names the place
        ├── MissingParameter         nothing goes without it
        ├── UnknownParameter         no API has it: a spelling mistake, most likely
        └── UnsupportedParameter     OpenAI or SGLang have it, and it cannot be honoured here
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

_SHOWN = 80
_MOST_NAMED = 16
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class InvalidRequest(BadRequest):
    """``param`` is the place of the fault as OpenAI spells it, ``messages.[2].content``; None: the whole body."""

    code = "invalid_value"

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class MissingParameter(InvalidRequest):
    """``param`` is not there, or null."""

    code = "missing_required_parameter"

    def __init__(self, param: str, wanted: str) -> None:
        super().__init__(param, f"Missing required parameter: '{param}'; wanted {wanted}.")


class UnknownParameter(InvalidRequest):
    """A name that is known to no API, or several of them; ``param`` is the first."""

    code = "unknown_parameter"

    def __init__(self, *params: str) -> None:
        shown = [param[:_SHOWN] for param in params[:_MOST_NAMED]]
        word = "parameter" if len(params) == 1 else "parameters"
        names = ", ".join(f"'{name}'" for name in shown)
        more = f", and {len(params) - len(shown)} more" if len(params) > len(shown) else ""
        super().__init__(shown[0], f"Unknown {word}: {names}{more}.")


class UnsupportedParameter(InvalidRequest):
    """``why`` it cannot be honoured, and what to do instead."""

    code = "unsupported_parameter"

    def __init__(self, param: str, why: str) -> None:
        super().__init__(param, f"Unsupported parameter: '{param}': {why}.")


def wrong(param: str | None, wanted: str, value: object) -> InvalidRequest:
    """The error of a ``value`` that is not what was ``wanted``."""
    place = "the body" if param is None else f"'{param}'"
    return InvalidRequest(param, f"Invalid value for {place}: wanted {wanted}, got {_shown(value)}.")


def _shown(value: object) -> str:
    """``value`` as a client recognises it; of a long one, what it is."""
    if isinstance(value, list | array):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    return "null" if value is None else repr(value).lower()  # JSON's true and false


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI words it; the type follows from the HTTP ``status``."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: HTTPError) -> bytes:
    """The JSON body of a reply that fails with ``error``."""
    param = error.param if isinstance(error, InvalidRequest) else None
    return orjson.dumps(error_object(error.status, str(error), param=param, code=error.code))
