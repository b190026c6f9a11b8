"""``docs/openapi.yaml``, and what it says of a request or an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

__all__ = ["DOCUMENT", "content_of", "documents", "key_of", "operations", "unlike"]

DOCUMENT: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "docs" / "openapi.yaml").read_text(encoding="utf-8")
)


def operations() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Method, path, and what stands there."""
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                yield method.upper(), path, operation


def unlike(schema: Mapping[str, Any], value: Any) -> list[str]:
    """Return the faults of ``value`` by ``schema``, which may refer to the document's components."""
    whole = {**schema, "components": DOCUMENT["components"]}
    errors = jsonschema.Draft202012Validator(whole).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]


def _responses(method: str, path: str) -> Mapping[str, Any]:
    responses: Mapping[str, Any] = DOCUMENT["paths"][path][method.lower()]["responses"]
    return responses


def key_of(method: str, path: str, status: int) -> str:
    """Under which of its keys ``status`` is described."""
    key = str(status)
    return key if key in _responses(method, path) else f"{key[0]}XX"


def content_of(method: str, path: str, status: int) -> Mapping[str, Any]:
    """Return the described content, by media type."""
    response = _responses(method, path)[key_of(method, path, status)]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    content: Mapping[str, Any] = response.get("content", {})
    return content


def documents(method: str, path: str, status: int, content_type: str, body: bytes) -> list[Any]:
    """The JSON of an answer, or of each event of a stream; an AssertionError when it is not what is described."""
    content = content_of(method, path, status)
    if not content:
        assert (content_type, body) == ("", b"")
        return []
    media = content[content_type.partition(";")[0]]
    if not media:  # bytes of another format
        return []
    parts, schema = [body], media["schema"]
    if content_type.startswith("text/event-stream"):
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        parts = [event.removeprefix(b"data: ") for event in events]
        schema = schema["properties"]["data"]["anyOf"][1]["contentSchema"]
    found = [orjson.loads(part) for part in parts]
    for document in found:
        assert unlike(schema, document) == [], document
    return found
