"""The description of the router's routes: ``docs/openapi.yaml`` of this version."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["described"]

#: The build puts the file beside this module; a checkout has it among the docs.
_PLACES = (
    Path(__file__).parent / "openapi.yaml",
    Path(__file__).parents[2] / "docs" / "openapi.yaml",
)
#: The key, in a tag or an operation, that names the plugin which answers.
_PLUGIN = "x-plugin"


def described(plugins: Collection[str]) -> dict[str, Any]:
    """Return the OpenAPI document of a router with ``plugins``, without operations and tags of other plugins."""
    import yaml  # not at the start: the import takes 0.1 s, and most routers never serve the description

    path = next(path for path in _PLACES if path.is_file())
    # The parser in C takes 40 ms, the one in Python 300 ms.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)
    document["info"]["version"] = version("slime-router")
    document["servers"] = [{"url": "/"}]
    owners = {tag["name"]: tag.get(_PLUGIN) for tag in document["tags"]}
    left_out = {name for name, plugin in owners.items() if plugin is not None and plugin not in plugins}
    document["tags"] = [tag for tag in document["tags"] if tag["name"] not in left_out]
    paths: dict[str, dict[str, Any]] = {}
    for name, item in document["paths"].items():
        kept = {key: value for key, value in item.items() if _is_answered(value, owners, plugins)}
        if kept.keys() - {"parameters"}:
            paths[name] = kept
    document["paths"] = paths
    return document


def _is_answered(operation: Any, owners: dict[str, str | None], plugins: Collection[str]) -> bool:
    """Return True for an operation of the core or of one of ``plugins``, and for the ``parameters`` of a path."""
    if not isinstance(operation, dict):
        return True
    (tag,) = operation["tags"]
    plugin = operation.get(_PLUGIN, owners[tag])
    return plugin is None or plugin in plugins
