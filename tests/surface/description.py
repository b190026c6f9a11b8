"""``docs/openapi.yaml``, and what it says of a request or an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

__all__ = ["DOCUMENT", "operations", "unlike"]

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
    """Why ``value`` does not fit ``schema``, which may refer to the document's components; empty when it does."""
    whole = {**schema, "components": DOCUMENT["components"]}
    errors = jsonschema.Draft202012Validator(whole).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]
