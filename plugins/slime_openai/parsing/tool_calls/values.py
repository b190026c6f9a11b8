"""Values that a model writes as bare text, converted to JSON by the tool's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

__all__ = ["Value", "dumps"]

#: JSON Schema's names for Python's types. An integer is a number too.
_NAMES = {
    bool: ("boolean",),
    dict: ("object",),
    float: ("number",),
    int: ("integer", "number"),
    list: ("array",),
}


class Value:
    """Writes one value as JSON: a string is streamed, any other value is written at its end.

    ``schema`` gives the type. Without a type, or if the text does not fit the type, the value is a string. The
    word null is JSON's null. A newline at the end is left out.
    """

    def __init__(self, write: Callable[[str], object], schema: Any) -> None:
        self._write = write
        self._types = frozenset(_types(schema))
        self._is_string = self._types <= {"string", "null"}
        self._begun = False
        self._held: list[str] = []

    def add(self, text: str) -> None:
        """Add more of the text."""
        self._held.append(text)
        if not self._is_string:
            return
        text = "".join(self._held)
        body = text.removesuffix("\n")
        if self._begun or not "null".startswith(body.lower()):
            self._write(_escaped(body) if self._begun else f'"{_escaped(body)}')
            self._begun = True
            self._held = [text[len(body) :]]

    def finish(self, *, cut: bool) -> None:
        """End the value. ``cut``: the rest of the text is unknown, so the JSON stays open."""
        text = "".join(self._held)
        if self._begun:
            self._write(_escaped(text) if cut else '"')
        elif cut:
            self._write(f'"{_escaped(text)}' if self._is_string and text else text)
        else:
            self._write(_json(text.removesuffix("\n"), self._types))


def dumps(text: str) -> str:
    """Return ``text`` as a JSON string."""
    return orjson.dumps(text).decode()


def _escaped(text: str) -> str:
    return dumps(text)[1:-1]


def _json(text: str, types: frozenset[str]) -> str:
    bare = text.strip()
    word = bare.lower()
    if word == "null" or ("boolean" in types and word in ("true", "false")):
        return word
    try:
        value = orjson.loads(bare)
    except orjson.JSONDecodeError:
        return dumps(text)
    return dumps(text) if types.isdisjoint(_NAMES.get(type(value), ())) else bare


def _types(schema: Any) -> Iterator[str]:
    """Yield the JSON types that ``schema`` names."""
    if not isinstance(schema, dict):
        return
    declared = schema.get("type")
    for name in declared if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            yield name
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            yield from _types(alternative)
