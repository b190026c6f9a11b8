"""Rules for functions with which plugins implement hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pluggy

__all__ = ["by_position", "misfit"]

#: Hooks that may be plain or async functions, and the hook that must be async.
_MAY_WAIT, _ASYNC = ("pre_request", "post_response"), "on_weight_update"


def misfit(hook: str, item: pluggy.HookImpl) -> str | None:
    """Return the rule that an implementation of ``hook`` breaks, in words that follow "must"; None: it is valid."""
    if item.wrapper or item.hookwrapper:
        return "not be a wrapper: to wrap a whole exchange, write ASGI middleware"
    if inspect.isasyncgenfunction(item.function):
        return "return an async context manager: put @asynccontextmanager below @hookimpl"
    if hook in _MAY_WAIT or inspect.iscoroutinefunction(item.function) == (hook == _ASYNC):
        return None
    return "be an async function" if hook == _ASYNC else "not be an async function"


def by_position(
    function: Callable[..., Any], takes: Sequence[str], offered: Sequence[str]
) -> Callable[..., Any]:
    """Wrap ``function``: the wrapper takes all arguments of the hook by position, and passes on only ``takes``."""
    if tuple(takes) == tuple(offered):
        return function
    places = [offered.index(name) for name in takes]
    return lambda *values: function(*(values[place] for place in places))
