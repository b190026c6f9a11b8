"""Reference of the Python client, from its signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from docs.generate.tables import docstring
from slime_radix_cache import client


def page() -> str:
    """Return the page."""
    things = [getattr(client, name) for name in client.__all__]
    # The synchronous client comes first, since docstrings of the asynchronous client refer to it.
    things.sort(key=lambda thing: (not inspect.isclass(thing), thing is client.AsyncClient, thing.__name__))
    things.sort(key=lambda thing: inspect.isclass(thing) and issubclass(thing, Exception))
    sections = [section for thing in things for section in _sections(thing)]
    return (
        f"# Python client\n\n`slime_radix_cache.client`. {docstring(client)}\n\n"
        + "\n\n".join(sections)
        + "\n"
    )


def _sections(thing: Any) -> Iterator[str]:
    name = thing.__name__
    if not inspect.isclass(thing):
        yield f"## {name}()\n\n{_signature('def', name, thing)}\n\n{docstring(thing)}"
        return
    signature = "" if issubclass(thing, Exception) else _signature("class", name, thing)
    yield f"## {name}\n\n{signature}\n\n{docstring(thing)}"
    for method, function in vars(thing).items():
        if inspect.isfunction(function) and not method.startswith("_"):
            kind = "async def" if inspect.iscoroutinefunction(function) else "def"
            yield f"### {name}.{method}()\n\n{_signature(kind, method, function)}\n\n{docstring(function)}"


def _signature(kind: str, name: str, thing: Callable[..., Any]) -> str:
    signature = inspect.signature(thing)
    parameters = [part for part in signature.parameters.values() if part.name != "self"]
    returns = signature.empty if kind == "class" else signature.return_annotation
    # Annotations are strings, since they are not evaluated. So the signature has them in quotes, which are removed.
    shown = str(signature.replace(parameters=parameters, return_annotation=returns)).replace("'", "")
    line = f"{kind} {name}{shown}"
    if len(line) > 90:
        inner, end = shown[1:].rsplit(")", 1)
        line = f"{kind} {name}(\n" + "".join(f"    {part},\n" for part in _split(inner)) + f"){end}"
    return f"```python\n{line}\n```"


def _split(parameters: str) -> list[str]:
    """Return the parameters, divided at commas that are not within brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
