"""Typed reads of the fields of a JSON object. Absent and null mean the default; a wrong type raises BadRequest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_engine.errors import BadRequest

__all__ = ["JSONObject", "boolean", "integer", "is_int", "number", "string", "strings"]

JSONObject = Mapping[str, Any]


def is_int(value: object) -> bool:
    """Return True for an integer. A boolean is not one, although Python's bool is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, wanted: str, value: object) -> BadRequest:
    return BadRequest(f"{name} must be {wanted}, got {value!r}.")


def boolean(body: JSONObject, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def integer(body: JSONObject, name: str, default: int, *, minimum: int | None = None) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not is_int(value) or (minimum is not None and value < minimum):
        raise _wrong(name, "an integer" if minimum is None else f"an integer of at least {minimum}", value)
    return int(value)


def number(body: JSONObject, name: str, default: float, *, low: float, high: float) -> float:
    """Read a number in ``[low, high]``."""
    value = body.get(name)
    if value is None:
        return default
    if not (is_int(value) or isinstance(value, float)) or not low <= value <= high:
        raise _wrong(name, f"a number in [{low}, {high}]", value)
    return float(value)


def string(body: JSONObject, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def strings(body: JSONObject, name: str) -> tuple[str, ...]:
    """Read a string or a list of strings, without the empty ones."""
    value = body.get(name)
    values = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise _wrong(name, "a string or a list of strings", value)
    return tuple(item for item in values if item)
