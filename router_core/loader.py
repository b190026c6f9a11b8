"""From names on the command line to plugins.

``--plugin NAME`` is an entry point of the group ``slime_router``. ``--middleware-paths PATH`` is a dotted path
to a plugin module, to a plugin factory, or to an ASGI middleware class of slime's form
``__init__(self, app, *, router)``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from router_core.errors import PluginError
from router_core.hooks import new_plugin_manager
from router_core.hookspecs import PROJECT

__all__ = ["DEFAULT_PLUGINS", "Loaded", "installed_plugins", "load"]

#: Loaded without being asked for, in this order, before those of ``--plugin``.
DEFAULT_PLUGINS = ("health", "policies")

Factory = Callable[[argparse.Namespace], object]


@dataclass(frozen=True, slots=True)
class _Source:
    """A plugin that is not made yet: ``module`` may hold ``add_options``, ``factory`` is None for a plain module."""

    name: str
    module: object
    factory: Factory | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The plugins of one command line, and the middleware classes, first one outermost."""

    sources: tuple[_Source, ...]
    middleware: tuple[type[Any], ...]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Let each plugin add its flags. Raises PluginError when two add the same one."""
        for source in self.sources:
            add = getattr(source.module, "add_options", None)
            if add is None or not hasattr(add, f"{PROJECT}_impl"):
                continue
            try:
                add(parser)
            except argparse.ArgumentError as error:
                raise PluginError(f"plugin {source.name!r}: {error}") from None

    def make(self, options: argparse.Namespace) -> pluggy.PluginManager:
        """Make the plugins, registered in order. Raises StartupError."""
        manager = new_plugin_manager()
        for source in self.sources:
            plugin = source.factory(options) if source.factory is not None else source.module
            if plugin is None:
                raise PluginError(f"plugin {source.name!r}: its factory returned None instead of a plugin")
            if source.factory is not None and hasattr(
                getattr(plugin, "add_options", None), f"{PROJECT}_impl"
            ):
                raise PluginError(
                    f"plugin {source.name!r}: add_options must be a function beside its factory"
                )
            try:
                manager.register(plugin, source.name)
            except (ValueError, pluggy.PluginValidationError) as error:
                raise PluginError(f"plugin {source.name!r}: {str(error).splitlines()[0]}") from None
        return manager


def installed_plugins() -> dict[str, EntryPoint]:
    """Entry points of the group ``slime_router`` by name, sorted. Raises PluginError when a name is there twice."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=PROJECT), key=lambda point: point.name):
        if found.setdefault(point.name, point).value != point.value:
            raise PluginError(
                f"plugin {point.name!r} is installed twice: {found[point.name].value} and {point.value}"
            )
    return found


def load(names: Iterable[str], paths: Iterable[str]) -> Loaded:
    """Import what ``--plugin`` and ``--middleware-paths`` name. Raises PluginError."""
    installed = installed_plugins()
    sources: list[_Source] = []
    middleware: list[type[Any]] = []
    for name in dict.fromkeys(names):
        if name not in installed:
            raise PluginError(f"no plugin {name!r}; installed: {', '.join(installed) or 'none'}")
        try:
            target = installed[name].load()
        except Exception as error:
            raise PluginError(
                f"plugin {name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        sources.append(_source(name, target))
    for path in dict.fromkeys(paths):
        target = _import(path)
        if inspect.isclass(target) and "router" in inspect.signature(target).parameters:
            middleware.append(target)
        else:
            sources.append(_source(path, target))
    return Loaded(tuple(sources), tuple(middleware))


def _source(name: str, target: Any) -> _Source:
    if inspect.ismodule(target):
        return _Source(name, target, getattr(target, "make_plugin", None))
    if callable(target):
        return _Source(name, sys.modules[target.__module__], target)
    raise PluginError(
        f"{name}: wanted a plugin module, a factory or a middleware class, got {type(target).__name__}"
    )


def _import(path: str) -> Any:
    """The module or attribute at a dotted path; ``package.module:name`` works too."""
    module_path, colon, name = path.partition(":")
    try:
        if colon:
            return getattr(importlib.import_module(module_path), name)
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            parent, dot, name = path.rpartition(".")
            if not dot or not (path == error.name or path.startswith(f"{error.name}.")):
                raise
            return getattr(importlib.import_module(parent), name)
    except Exception as error:
        raise PluginError(f"--middleware-paths {path}: {type(error).__name__}: {error}") from error
