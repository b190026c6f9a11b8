"""Reference of error codes, from the classes that define them."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from docs.generate.tables import Table, code, docstring
from router_core.errors import HTTPError
from router_core.loader import installed_plugins

_INTRODUCTION = """\
# Error codes

Made from the classes of errors. The body of an error is `{"error": {"message", "type", "code"}}`.
The message says what was wanted and what was found. A few answers have [another form](../operations.md#errors).

"""


def page() -> str:
    """Return the page, with a row for each code and status."""
    _import_all()
    rows: dict[tuple[int, str, str], tuple[str, str]] = {}
    classes: list[type[HTTPError]] = [HTTPError, *_subclasses(HTTPError)]
    for error in classes:
        if "code" not in vars(error) and "status" not in vars(error):
            continue  # the row of its base class is enough
        owner = error.__module__.partition(".")[0]
        rows.setdefault(
            (error.status, error.code, error.type), (owner, docstring(error).partition("\n\n")[0])
        )
    table = Table("status", "code", "type", "", "from")
    for (status, name, kind), (owner, about) in sorted(rows.items()):
        table.add(str(status), code(name), code(kind), about, _from(owner))
    return f"{_INTRODUCTION}{table}"


def _import_all() -> None:
    """Import each module that may define errors."""
    packages = {point.module.partition(".")[0] for point in installed_plugins().values()}
    for name in sorted(packages | {"router_core"}):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.ispkg and "(HTTPError)" in _source(module):
                importlib.import_module(module.name)


def _source(module: pkgutil.ModuleInfo) -> str:
    found = importlib.util.find_spec(module.name)
    return Path(found.origin).read_text() if found and found.origin and found.origin.endswith(".py") else ""


def _subclasses(base: type[HTTPError]) -> Iterator[type[HTTPError]]:
    for error in base.__subclasses__():
        yield error
        yield from _subclasses(error)


def _from(owner: str) -> str:
    name = owner.removeprefix("slime_")
    return "the router" if owner in ("router_core", "slime_http") else f"[{name}](../plugins/{name}.md)"
