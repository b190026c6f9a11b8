"""The JSON that the router parses and writes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import orjson
import pytest

__all__ = ["Coded", "watch_json"]

#: Smaller documents are parts of larger ones, such as a finish reason.
LARGE = 200
ENGINES = ("slime_engine", "slime_testing")


class Coded(NamedTuple):
    """A document that the router's own code has parsed or written."""

    how: str
    data: bytes
    value: Any


def watch_json(monkeypatch: pytest.MonkeyPatch, *, larger_than: int = LARGE) -> list[Coded]:
    """Keep all large documents that the router parses or writes from now on."""
    loads, dumps = orjson.loads, orjson.dumps
    seen: list[Coded] = []

    def note(how: str, data: bytes | str, value: Any) -> None:
        module = sys._getframe(2).f_globals["__name__"]
        if (
            module.startswith(("router_core", "slime_"))
            and not module.startswith(ENGINES)
            and len(data) > larger_than
        ):
            seen.append(Coded(how, data.encode() if isinstance(data, str) else bytes(data), value))

    def noted_loads(data: Any) -> Any:
        value = loads(data)
        note("parsed", data, value)
        return value

    def noted_dumps(value: Any, *more: Any, **options: Any) -> bytes:
        data = dumps(value, *more, **options)
        note("written", data, value)
        return data

    monkeypatch.setattr(orjson, "loads", noted_loads)
    monkeypatch.setattr(orjson, "dumps", noted_dumps)
    return seen
