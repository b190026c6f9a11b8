"""Loads the plugins that the command line names.

``--plugin NAME`` is an entry point of the group ``slime_router``. ``--middleware-paths PATH`` is a dotted path to a
plugin module, a plugin factory or an ASGI middleware class. The constructor of the class is ``__init__(self, app,
*, router)``, as in slime, or the usual ``__init__(self, app)``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pluggy

from router_core.errors import MissingComponent, PluginError
from router_core.hooks import attribute_errors, hook_names, new_plugin_manager
from router_core.hookspecs import PROJECT
from router_core.router import Router
from router_core.types import ASGIApp
from slime_start.default_plugins import DEFAULT_PLUGINS
from slime_start.dotted_paths import import_path, is_middleware, takes_router
from slime_start.help_page import about, grouped
from slime_start.hints import path_cure, unknown_plugin
from slime_start.installed import entry_points
from slime_start.ordering import Needs, in_order, missing

__all__ = ["Loaded", "installed_plugins", "load"]

logger = logging.getLogger(__name__)

Factory = Callable[[argparse.Namespace], object | None]


@dataclass(frozen=True, slots=True)
class _Source:
    """A plugin that is not made yet; ``factory`` is None for a plain module.

    ``add_options`` is looked up in each of ``modules``: the named module, then the module that defines the factory.
    """

    name: str
    modules: tuple[object, ...]
    factory: Factory | None

    def _add_options_hook(self) -> Any:
        """Return the plugin's ``add_options``, or None."""
        found: list[Any] = [getattr(module, "add_options", None) for module in self.modules]
        return next(filter(_is_hook, found), None)

    def _declared(self, name: str, default: Any) -> Any:
        """Return the attribute ``name`` of the first module that has it, else ``default``."""
        found = (getattr(module, name, None) for module in self.modules)
        return next((each for each in found if each is not None), default)

    @property
    def about(self) -> str:
        """The plugin's purpose, from its docstring."""
        return about(*self.modules)

    def needs(self, options: argparse.Namespace) -> Needs:
        """Return what the plugin requires with these ``options``, and what it provides. Raises StartupError."""
        requires = self._declared("requires", {})
        with attribute_errors(self.name, "requires"):
            required = dict(requires(options) if callable(requires) else requires)
        return required, tuple(self._declared("provides", ()))

    def place(self) -> tuple[bool, bool]:
        """Return the sort key of ``add_options``: the marks ``tryfirst`` and ``trylast`` count as for other hooks."""
        marks = getattr(self._add_options_hook(), f"{PROJECT}_impl", {})
        return bool(marks.get("trylast")), not marks.get("tryfirst")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the plugin's flags, if it has any. Raises StartupError."""
        add = self._add_options_hook()
        if add is not None:
            with attribute_errors(self.name, "add_options"):
                add(parser)

    def make(self, options: argparse.Namespace) -> object | None:
        """Make the plugin. Returns None when these ``options`` leave it nothing to do. Raises StartupError."""
        if self.factory is None:
            return self.modules[0]
        with attribute_errors(self.name, "its factory"):
            plugin = self.factory(options)
        if _is_hook(getattr(plugin, "add_options", None)):
            raise PluginError(f"plugin {self.name!r}: add_options must be a function beside its factory")
        return plugin


@dataclass(frozen=True, slots=True)
class Loaded:
    """The plugins of one command line, and its middleware constructors, the outermost first."""

    sources: tuple[_Source, ...]
    middleware: tuple[Any, ...]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Let each plugin add its flags. Raises StartupError, also when two plugins add the same flag."""
        for source in sorted(self.sources, key=_Source.place):
            with grouped(parser, source.name, source.about):
                source.add_options(parser)

    @property
    def names(self) -> set[str]:
        """The names of the plugins."""
        return {source.name for source in self.sources}

    def make(self, options: argparse.Namespace) -> pluggy.PluginManager:
        """Make and register the plugins, each after the plugins that it requires. Raises StartupError."""
        manager = new_plugin_manager()
        needs = [source.needs(options) for source in self.sources]
        if (lack := missing(needs)) is not None:
            place, component = lack
            cure = f"{needs[place][0][component]} (no plugin provides the component {component!r})"
            raise MissingComponent(f"{self.sources[place].name} needs {cure}")
        for source in map(self.sources.__getitem__, in_order(needs)):
            plugin = source.make(options)
            if plugin is None:
                level = logging.DEBUG if source.name in DEFAULT_PLUGINS else logging.INFO
                logger.log(level, "plugin %r has nothing to do", source.name)
                continue
            _check_marks(source.name, plugin)
            try:
                manager.register(plugin, source.name)
            except pluggy.PluginValidationError as error:
                # The lines of the message are the hook, its definition, and the mistake.
                raise PluginError(" ".join(str(error).split())) from None
            except ValueError:
                raise PluginError(
                    f"plugin {source.name!r} is loaded twice, once under another name"
                ) from None
            if not manager.get_hookcallers(plugin):
                raise PluginError(f"plugin {source.name!r} has no hooks; known: {', '.join(hook_names())}")
        return manager


def _is_hook(function: object) -> bool:
    return hasattr(function, f"{PROJECT}_impl")


def _check_marks(name: str, plugin: object) -> None:
    """Refuse a function that has a hook's name but no ``@hookimpl``: it would never be called. Raises PluginError."""
    for hook in hook_names():
        function = getattr(plugin, hook, None)
        if inspect.isroutine(function) and not _is_hook(function):
            raise PluginError(f"plugin {name!r}: {hook} lacks @hookimpl (if it is not a hook, rename it)")


def installed_plugins() -> dict[str, EntryPoint]:
    """Return the entry points of the group ``slime_router``, sorted by name. Raises PluginError for a duplicate."""
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
    middleware: list[Any] = []
    for name in dict.fromkeys(names):
        if name not in installed:
            raise PluginError(unknown_plugin(name, installed))
        point = installed[name]
        with attribute_errors(name, "its import"):
            sources.append(_source(name, point.load(), importlib.import_module(point.module)))
    for path in dict.fromkeys(paths):
        try:
            target, module = import_path(path)
        except Exception as error:
            is_path = isinstance(error, ModuleNotFoundError | TypeError) or path.endswith(".py")
            cure = path_cure(path, installed) if is_path else ""
            raise PluginError(f"--middleware-paths {path}: {type(error).__name__}: {error}{cure}") from error
        if is_middleware(target):
            middleware.append(_named(path, target))
        else:
            sources.append(_source(path, target, module))
    return Loaded(tuple(sources), tuple(middleware))


def _named(path: str, middleware: type[Any]) -> Callable[..., Any]:
    """Wrap the class ``middleware``: its constructor gets the router if it takes one, and its errors name ``path``."""

    def make(app: ASGIApp, *, router: Router) -> Any:
        router.hooks.owners.add(path, middleware)
        with attribute_errors(path, "its constructor"):
            return middleware(app, router=router) if takes_router(middleware) else middleware(app)

    return make


def _source(name: str, target: Any, module: ModuleType) -> _Source:
    if inspect.ismodule(target):
        return _Source(name, (target,), getattr(target, "make_plugin", None))
    if callable(target):
        return _Source(name, (module, sys.modules.get(target.__module__)), target)
    raise PluginError(
        f"{name}: wanted a plugin module, a factory or a middleware class, got {type(target).__name__}"
    )
