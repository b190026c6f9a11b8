"""Objects at dotted paths: plugins, and classes of ASGI middleware."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

__all__ = ["import_path", "is_middleware", "takes_router"]

_ASGI = ["scope", "receive", "send"]


def import_path(path: str) -> tuple[Any, ModuleType]:
    """Return the object at ``path``, and its module. ``package.module:name`` is a path too. Raises any exception."""
    parent, separator, name = path.rpartition(":")
    if not separator:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            parent, separator, name = path.rpartition(".")
            if not separator or not (path == error.name or path.startswith(f"{error.name}.")):
                raise
        else:
            return module, module
    module = importlib.import_module(parent)
    return getattr(module, name), module


def is_middleware(target: Any) -> bool:
    """Return True for a class that wraps an ASGI application. False for a plugin's class, which takes options."""
    if not inspect.isclass(target):
        return False
    parameters = list(inspect.signature(target).parameters)
    called = getattr(target, "__call__", None)  # noqa: B004  # its parameters are wanted
    is_asgi = (
        list(inspect.signature(called).parameters)[1:4] == _ASGI if inspect.isfunction(called) else False
    )
    return is_asgi or "router" in parameters or parameters[:1] == ["app"]


def takes_router(middleware: type[Any]) -> bool:
    """Return True when the constructor of ``middleware`` takes ``router``, as slime's middleware does."""
    parameters = inspect.signature(middleware).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return "router" in parameters or inspect.Parameter.VAR_KEYWORD in kinds
