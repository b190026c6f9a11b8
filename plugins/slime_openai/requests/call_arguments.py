"""JSON without loss, for the arguments of calls: integers of any size, every digit of a fraction, every key."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from operator import itemgetter
from typing import Any

__all__ = ["as_object", "as_written", "canonical", "read_exactly", "write"]

#: Levels of brackets. Deeper JSON is not read: the depth at which Python's own reader fails is not fixed.
_DEEPEST = 254
#: Marks for repeated keys, and for numbers that no float is equal to. They are random, so no client can send them.
_AGAIN, _DIGITS = (f"{word}{secrets.token_hex(8)}" for word in ("again", "digits"))
_MARKED = re.compile(rf"""{_AGAIN}\d+|["']?{_DIGITS}([-+.\w]+){_DIGITS}["']?""")
#: Integers of this many characters or more are kept as text: Python refuses to read more than 4,300 digits.
_LONGEST_INTEGER = 4_000
#: Limits of the cache of canonical texts: the number of entries, and the longest cached text in characters. The cache
#: takes some tens of MB at most, and 3 MB for texts of the usual 100 characters.
_CACHED, _LONGEST_CACHED = 1 << 13, 1 << 10
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|([\[{])|([\]}])', re.DOTALL)


class _RepeatedKeys(dict[str, Any]):
    """A JSON object in which a key repeats. ``items()`` has each pair."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._pairs = tuple(pairs)
        super().__init__(self._pairs)

    def items(self) -> Any:
        """Return all pairs, in order."""
        return self._pairs


class _Digits(str):
    """A number that no float is equal to, as text."""

    __slots__ = ()


def read_exactly(text: str | bytes) -> Any:
    """Return the value of a client's JSON, whose depth was checked before. Raises ValueError, RecursionError."""
    return _load(text, _number, _object)


def canonical(text: str, *, sort: bool) -> str:
    """Return equal text for equal arguments. Text that is not JSON, or nested too deep, is returned as it is.

    With ``sort``, the order of keys does not count. Results for short texts are cached: a chat sends all its earlier
    calls again in each turn.
    """
    return _cached(text, sort) if len(text) <= _LONGEST_CACHED else _canonical(text, sort)


def _canonical(text: str, sort: bool) -> str:
    try:
        return write(_read(text, _number, _object), sort=sort)
    except (ValueError, RecursionError):
        return text


_cached = lru_cache(_CACHED)(_canonical)


def as_object(text: str) -> dict[str, Any] | None:
    """Return the object in ``text`` for a template, whose output must pass through :func:`as_written`.

    Return None when ``text`` is no object, is nested too deep, or has a string that UTF-8 cannot encode.
    """
    try:
        value = _read(text, _marked_number, _with_marked_keys)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # UTF-8 cannot encode half a surrogate pair
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_written(text: str) -> str:
    """Return ``text``, which a template made of objects from :func:`as_object`, with the original digits and keys."""
    return _MARKED.sub(r"\1", text) if _AGAIN in text or _DIGITS in text else text


def write(value: Any, *, sort: bool = False) -> str:
    """Return ``value`` as compact JSON. Raises TypeError for types that JSON lacks, ValueError if nested too deep."""
    return _written(value, sort, _DEEPEST)


def _read(text: str, number: Callable[[str], Any], make_object: Callable[[Any], Any]) -> Any:
    if text.count("{") + text.count("[") > _DEEPEST and _depth(text) > _DEEPEST:
        raise ValueError("nested too deep")
    return _load(text, number, make_object)


def _load(text: str | bytes, number: Callable[[str], Any], make_object: Callable[[Any], Any]) -> Any:
    def integer(written: str) -> Any:
        return int(written) if len(written) < _LONGEST_INTEGER else number(written)

    return json.loads(text, parse_int=integer, parse_float=number, object_pairs_hook=make_object)


def _depth(text: str) -> int:
    depth = deepest = 0
    for bracket in _BRACKET.finditer(text):
        depth += bool(bracket[1]) - bool(bracket[2])
        deepest = max(deepest, depth)
    return deepest


def _number(written: str) -> float | _Digits:
    value = float(written)
    try:
        return value if Decimal(repr(value)) == Decimal(written) else _Digits(written)
    except InvalidOperation:  # its exponent is too large for Decimal
        return _Digits(written)


def _marked_number(written: str) -> float | str:
    value = _number(written)
    return f"{_DIGITS}{value}{_DIGITS}" if isinstance(value, _Digits) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _RepeatedKeys(pairs)


def _string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only a JSON escape can express
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def _with_marked_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found[f"{key}{_AGAIN}{len(found)}" if key in found else key] = value
    return found


def _written(value: Any, sort: bool, depth: int) -> str:
    if isinstance(value, _Digits):
        return str(value)
    if isinstance(value, str):
        return _string(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return json.dumps(value)
    if not depth:
        raise ValueError("nested too deep")
    parts = []
    if isinstance(value, dict):
        for key, each in sorted(value.items(), key=itemgetter(0)) if sort else value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key of an object is a string, not {key!r}")
            parts.append(f"{_string(key)}:{_written(each, sort, depth - 1)}")
        return f"{{{','.join(parts)}}}"
    if isinstance(value, list | tuple):
        for each in value:
            parts.append(_written(each, sort, depth - 1))
        return f"[{','.join(parts)}]"
    raise TypeError(f"JSON has no {type(value).__name__}")
