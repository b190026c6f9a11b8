"""Reference of the hooks, from router_core/hookspecs.py."""

from __future__ import annotations

import inspect

from docs.generate.tables import docstring
from router_core import hookspecs
from router_core.hooks import hook_names

_INTRODUCTION = """\
# Hook signatures

Made from `router_core/hookspecs.py`.
[Hooks](../hooks.md) has the order in which they are called, their errors and examples.

"""


def page() -> str:
    """Return the page, with hooks in the order of their definitions."""
    found = {name: getattr(hookspecs, name) for name in hook_names()}
    in_order = sorted(found.items(), key=lambda item: item[1].__code__.co_firstlineno)
    return _INTRODUCTION + "\n\n".join(_section(name, hook) for name, hook in in_order) + "\n"


def _section(name: str, hook: object) -> str:
    assert callable(hook)
    kind = "async def" if inspect.iscoroutinefunction(hook) else "def"
    # Annotations are strings, since they are not evaluated. So the signature has them in quotes, which are removed.
    signature = f"@hookimpl\n{kind} {name}{inspect.signature(hook)}: ...".replace("'", "")
    anchor = f"../hooks.md#{name}{'-'.join(inspect.signature(hook).parameters)}"
    return f"## {name}\n\n```python\n{signature}\n```\n\n{docstring(hook)}\n\n[More]({anchor})."
