"""JSON schemas of the OpenAPI description, in words and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docs.generate.tables import Table, code

#: Names of limits in a schema, and their signs.
_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}
Schema = dict[str, Any]


class Schemas:
    """The schemas that have a name, each one a section of the page ``page``."""

    def __init__(self, document: Schema, page: str) -> None:
        self._document = document
        self._page = page

    def resolved(self, thing: Schema) -> Schema:
        """Return what ``thing`` refers to, or ``thing`` itself."""
        while "$ref" in thing:
            found: Any = self._document
            for part in thing["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            thing = found
        return thing

    def kind(self, schema: Schema) -> str:
        """Return the type of ``schema`` in a few words."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return f"[{name}]({self._page}#{name.lower()})"
        if "const" in schema:
            return code(json.dumps(schema["const"]))
        if "enum" in schema:
            return ", ".join(code(json.dumps(value)) for value in schema["enum"])
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return " or ".join(dict.fromkeys(self.kind(each) for each in schema[several]))
        kinds = schema.get("type", "any")
        words = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
        if "items" in schema:
            words = words.replace("array", f"array of {self.kind(schema['items'])}")
        limits = [
            form.format(schema[name])
            for name, form in _LIMITS.items()
            if schema.get(name) not in (None, 1, "")
        ]
        limits += (
            [f"of {json.dumps(schema['pattern'])}"]
            if "pattern" in schema and len(schema["pattern"]) < 40
            else []
        )
        return f"{words}, {', '.join(limits)}" if limits else words

    def table(self, schema: Schema, *, answer: bool = False) -> str:
        """Return a table of the fields of ``schema``, with inner fields as ``outer.inner``; empty without fields."""
        table = Table("field", "type", "" if answer else "required", "")
        for name, about, required in self._fields(self.resolved(schema), ""):
            table.add(code(name), self.kind(about), "yes" if required and not answer else "", words(about))
        return str(table) if table else ""

    def _fields(self, schema: Schema, outer: str) -> Iterator[tuple[str, Schema, bool]]:
        for part in schema.get("allOf", ()):
            yield from self._fields(self.resolved(part), outer)
        for name, about in schema.get("properties", {}).items():
            yield outer + name, about, name in schema.get("required", ())
            inner = about.get("items", about)
            if "$ref" not in inner and len(outer) < 40:
                yield from self._fields(inner, f"{outer}{name}{'[]' if inner is not about else ''}.")


def words(thing: Schema) -> str:
    """Return the description of ``thing`` in one line."""
    return " ".join(str(thing.get("description", thing.get("summary", ""))).split())
