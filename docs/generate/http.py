"""Reference of the HTTP API, from docs/openapi.yaml: an index, a page for each tag, and a page for the schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from docs.generate.pages import ROOT
from docs.generate.schemas import Schemas, words
from docs.generate.tables import Table, code

#: Keys by the names of the security schemes.
_KEYS = {"trafficKey": "the API key", "adminKey": "the admin key"}
_METHODS = ("get", "post", "put", "delete")


def pages() -> dict[str, str]:
    """Return the names and texts of the pages."""
    document = yaml.safe_load((ROOT / "docs" / "openapi.yaml").read_text())
    reference = _Reference(document)
    found = {f"{tag['name']}.md": reference.tag(tag) for tag in document["tags"]}
    return {**found, "index.md": reference.index(), "schemas.md": reference.schemas()}


class _Reference:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._schemas = Schemas(document, "schemas.md")

    def index(self) -> str:
        """Return the page that lists all operations."""
        info = self._document["info"]
        parts = [
            "# HTTP reference",
            "Made from [openapi.yaml](../../openapi.yaml), which the router serves at `/openapi.json`. "
            "[HTTP API](../../http-api.md) explains the routes.",
            info["description"].strip(),
        ]
        for tag in self._document["tags"]:
            table = Table("operation", "")
            for method, path, operation in self._operations(tag["name"]):
                title = f"{method.upper()} {path}"
                table.add(
                    f"[{code(title)}]({tag['name']}.md#{operation['operationId'].lower()})",
                    words_of(operation),
                )
            parts.append(f"## {tag['name']}\n\n{tag['description']}\n\n{table}")
        return "\n\n".join(parts)

    def tag(self, tag: dict[str, Any]) -> str:
        """Return the page of one tag."""
        sections = [self._operation(*each) for each in self._operations(tag["name"])]
        return "\n\n".join([f"# HTTP: {tag['name']}", tag["description"].strip(), *sections]) + "\n"

    def schemas(self) -> str:
        """Return the page of all schemas that have a name."""
        parts = [
            "# HTTP: schemas",
            "Bodies of requests and answers, and parts of them.",
        ]
        for name, schema in self._document["components"]["schemas"].items():
            table = self._schemas.table(schema, answer=True) or self._schemas.kind(schema)
            parts.append(f"## {name}\n\n{words(schema)}\n\n{table}")
        return "\n\n".join(parts) + "\n"

    def _operations(self, tag: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, item in self._document["paths"].items():
            for method in _METHODS:
                if method in item and tag in item[method]["tags"]:
                    shared = item.get("parameters", [])
                    operation = item[method]
                    yield (
                        method,
                        path,
                        {**operation, "parameters": [*shared, *operation.get("parameters", [])]},
                    )

    def _operation(self, method: str, path: str, operation: dict[str, Any]) -> str:
        heading = f"## `{method.upper()} {path}` {{ #{operation['operationId'].lower()} }}"
        parts = [heading, f"{words_of(operation)}."]
        if "description" in operation:
            parts.append(operation["description"].strip())
        parts.append(self._key(operation))
        parts += self._parameters(operation["parameters"])
        parts += self._body("Body", self._schemas.resolved(operation.get("requestBody", {})), answer=False)
        parts += self._responses(operation["responses"])
        return "\n\n".join(filter(None, parts))

    def _key(self, operation: dict[str, Any]) -> str:
        wanted = operation.get("security", self._document["security"])
        names = list(dict.fromkeys(_KEYS[name] for scheme in wanted for name in scheme))
        if not names:
            return "Needs no key."
        return f"Needs {' or '.join(names)}, if one is set." if {} not in wanted or names else ""

    def _parameters(self, parameters: list[dict[str, Any]]) -> Iterator[str]:
        table = Table("parameter", "in", "type", "required", "")
        for each in map(self._schemas.resolved, parameters):
            required = "yes" if each.get("required") else ""
            table.add(
                code(each["name"]), each["in"], self._schemas.kind(each["schema"]), required, words(each)
            )
        if table:
            yield f"**Parameters**\n\n{table}"

    def _body(self, title: str, body: dict[str, Any], *, answer: bool) -> Iterator[str]:
        for kind, content in body.get("content", {}).items():
            schema = content.get("schema", {})
            yield f"**{title}** {code(kind)}: {self._schemas.kind(schema)}. {words(self._schemas.resolved(schema))}"
            yield self._schemas.table(schema, answer=answer)
            named = content.get("examples", {})
            examples = [
                each["value"] for each in map(self._schemas.resolved, named.values()) if "value" in each
            ]
            for example in [content["example"], *examples] if "example" in content else examples:
                yield f"```json\n{json.dumps(example, indent=2, ensure_ascii=False)}\n```"

    def _responses(self, responses: dict[str, Any]) -> Iterator[str]:
        table = Table("status", "", "body", "headers")
        for status, response in responses.items():
            about = self._schemas.resolved(response)
            bodies = [
                f"{self._schemas.kind(content.get('schema', {}))}" if "schema" in content else code(kind)
                for kind, content in about.get("content", {}).items()
            ]
            table.add(
                code(status), words(about), ", ".join(bodies), ", ".join(map(code, about.get("headers", {})))
            )
        yield f"**Answers**\n\n{table}"
        for status, response in responses.items():
            about = self._schemas.resolved(response)
            if status.startswith("2"):
                yield from self._inline(status, about)

    def _inline(self, status: str, response: dict[str, Any]) -> Iterator[str]:
        """Yield the examples of an answer, and its fields if its schema has no name."""
        for content in response.get("content", {}).values():
            schema = content.get("schema", {})
            if "$ref" not in schema and self._schemas.table(schema, answer=True):
                yield f"Fields of the {status}:\n\n{self._schemas.table(schema, answer=True)}"
            if "example" in content:
                example = content["example"]
                shown = (
                    example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
                )
                yield f"For example:\n\n```json\n{shown}\n```"


def words_of(operation: dict[str, Any]) -> str:
    """Return the summary of an operation."""
    return str(operation["summary"]).rstrip(".")
