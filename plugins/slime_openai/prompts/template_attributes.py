"""Look-ups of attributes in a sandboxed template, with a shortcut for the members of messages.

To read ``message.role``, Jinja's sandbox first looks for an attribute. This raises an exception, and then the sandbox
reads the item. If the sandbox finds an attribute, it also checks if a template may read the attribute.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment
from jinja2.runtime import LoopContext

__all__ = ["with_short_lookups"]

#: Attributes of every dict. A template reads these attributes, not items with the same names.
_OF_DICTS = frozenset(dir(dict))
#: Attributes of a loop whose values are numbers and booleans, which every template may read.
_OF_LOOPS = frozenset(("first", "index", "index0", "last", "length", "revindex", "revindex0"))


def with_short_lookups(environment: Environment) -> Environment:
    """Return a copy of ``environment`` in which templates find the same attributes in less time."""
    copy = environment.overlay()
    by_sandbox, undefined = copy.getattr, copy.undefined

    def found(obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return by_sandbox(obj, attribute)

    copy.getattr = found  # type: ignore[method-assign]  # a template calls it as a function of its environment
    return copy
