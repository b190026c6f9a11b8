"""Readers of JSON values, which check parameters.

A reader takes a value and its path in the request (``param``), such as ``messages.[2].content``. The reader returns the
value that the router uses, or raises InvalidRequest. A table of readers lists the parameters of a route.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from slime_openai.errors import InvalidRequest, UnsupportedParameter, wrong

__all__ = [
    "Reader",
    "boolean",
    "encoded",
    "integer",
    "is_int",
    "mapping",
    "nested",
    "number",
    "one_of",
    "only",
    "or_each",
    "read_parameters",
    "refused",
    "string",
    "strings",
    "text",
    "token_ids",
]

Reader = Callable[[str, Any], Any]

#: The maximum of int32, in which workers keep ids. No vocabulary is as large.
_MAX_TOKEN_ID = 2**31 - 1


def read_parameters(body: Any, table: Mapping[str, Reader]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the values in ``body`` for which ``table`` has a reader. Return what was read, and all other values.

    Null counts as not given. Raises InvalidRequest.
    """
    if not isinstance(body, dict):
        raise wrong(None, "a JSON object", body)
    values: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        reader = table.get(name)
        if reader is None:
            unknown[name] = value
        else:
            values[name] = reader(name, value)
    return values, unknown


def is_int(value: object) -> bool:
    """Return True for integers. JSON's booleans are no integers, although Python's are."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int | None = None) -> Reader:
    """Return a reader of integers in ``[low, high]``."""
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(param: str, value: Any) -> int:
        if not is_int(value) or value < low or (high is not None and value > high):
            raise wrong(param, wanted, value)
        return int(value)

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """Return a reader of numbers in ``[low, high]``, or in ``(low, high]`` if ``above`` is True."""
    wanted = f"a number above {low}, up to {high}" if above else f"a number from {low} to {high}"

    def read(param: str, value: Any) -> int | float:
        fits = (is_int(value) or isinstance(value, float)) and low <= value <= high
        if not fits or (above and value == low):
            raise wrong(param, wanted, value)
        return value  # type: ignore[no-any-return]  # a number, see above

    return read


def boolean(param: str, value: Any) -> bool:
    """Read ``true`` or ``false``; any other value is refused."""
    if not isinstance(value, bool):
        raise wrong(param, "true or false", value)
    return value


def string(param: str, value: Any) -> str:
    """Read a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(param, "a string that is not empty", value)
    return value


def text(param: str, value: Any) -> str:
    """Read any string."""
    if not isinstance(value, str):
        raise wrong(param, "a string", value)
    return value


def strings(param: str, value: Any) -> list[str]:
    """Read one string or a list of strings, none of them empty."""
    if isinstance(value, str) and value:
        return [value]
    if not isinstance(value, list):
        raise wrong(param, "a string that is not empty, or a list of such strings", value)
    return [string(f"{param}.[{index}]", item) for index, item in enumerate(value)]


def token_ids(param: str, value: Any) -> Sequence[int]:
    """Read a list of token ids; a long list may come in an ``array``. Optimised for whole prompts."""
    if isinstance(value, array):
        if not np.frombuffer(value, np.int32).min() < 0:
            return value
        value = value.tolist()
    if not isinstance(value, list):
        raise wrong(param, "a list of token ids", value)
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > _MAX_TOKEN_ID):
        index = next(i for i, item in enumerate(value) if not is_int(item) or not 0 <= item <= _MAX_TOKEN_ID)
        raise wrong(f"{param}.[{index}]", "a token id", value[index])
    return value


def mapping(param: str, value: Any) -> dict[str, Any]:
    """Read a JSON object."""
    if not isinstance(value, dict):
        raise wrong(param, "an object", value)
    return value


def or_each(read: Reader) -> Reader:
    """Return a reader of one value, or of a list with a value for each prompt of a batch."""

    def read_all(param: str, value: Any) -> Any:
        if isinstance(value, list):
            return [read(f"{param}.[{index}]", item) for index, item in enumerate(value)]
        return read(param, value)

    return read_all


def nested(param: str, value: Any) -> dict[str, Any]:
    """Read a JSON object for the engine; refuse an object that is nested too deep."""
    encoded(param, [[mapping(param, value)]])  # two levels more, as in the engine's request
    return value  # type: ignore[no-any-return]  # a mapping, see above


def one_of(*choices: str) -> Reader:
    """Return a reader of a string that is one of ``choices``."""
    wanted = f"one of {', '.join(choices)}"

    def read(param: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise wrong(param, wanted, value)
        return value

    return read


def only(*honoured: object) -> Reader:
    """Return a reader that accepts only the values ``honoured``, which change nothing, and refuses any other value."""
    wanted = " or ".join(orjson.dumps(one).decode() for one in honoured)

    def read(param: str, value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in honoured):
            raise UnsupportedParameter(param, f"only {wanted} can be honoured")
        return value

    return read


def refused(why: str) -> Reader:
    """Return a reader that refuses the parameter, whatever its value. ``why``: see UnsupportedParameter."""

    def read(param: str, value: Any) -> Any:
        raise UnsupportedParameter(param, why)

    return read


def encoded(param: str, value: Any, *, option: int | None = None) -> str:
    """Return ``value`` as compact JSON, with orjson's ``option``.

    Raises InvalidRequest for a value that orjson cannot write, such as one that is nested too deep.
    """
    try:
        return orjson.dumps(value, option=option).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(
            param, f"Invalid value for '{param}': it cannot be written as JSON: {error}."
        ) from None
