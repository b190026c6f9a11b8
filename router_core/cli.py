"""The command ``slime-router``.

The command line is parsed twice: first for the names of plugins, then with the flags of these plugins.
A failed start prints one line with the reason; ``PYTHONDEVMODE=1`` adds the traceback for authors of plugins.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import ssl
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, NoReturn

import configargparse
from starlette.middleware.cors import CORSMiddleware

from router_core import proxy
from router_core.app import make_app
from router_core.errors import SettingsError, StartupError
from router_core.hookspecs import PROJECT
from router_core.loader import DEFAULT_PLUGINS, Loaded, installed_plugins, load
from router_core.logs import start_logging
from router_core.request_ids import RequestIds
from router_core.router import Router
from router_core.settings import Settings, add_core_options
from router_core.types import ASGIApp
from slime_http.serving import bind, run

__all__ = ["build", "command_line", "is_compiled", "main"]

logger = logging.getLogger(__name__)
_NOT_LOADED = "{0} belongs to the plugin {1!r}, which is not loaded: add --plugin {1}"


class _Parser(configargparse.ArgumentParser):  # type: ignore[misc]  # the library has no types
    """Reads flags from the command line, the environment and a file; raises SettingsError for a mistake."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="slime-router",
        description="The router between RL rollouts and their inference engines: text in, exact tokens out.",
        auto_env_var_prefix="SLIME_ROUTER_",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument(
        "--config", is_config_file_arg=True, metavar="FILE", help="a file of flags, one 'name = value' a line"
    )
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="NAME",
        help="load an installed plugin; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--middleware-paths", "--slime-router-middleware-paths", nargs="*", action="extend", default=[],
        metavar="PATH", help="dotted paths of plugins, or of ASGI middleware classes",
    )  # fmt: skip
    parser.add_argument(
        "--no-default-plugins", action="store_true", help=f"do not load {', '.join(DEFAULT_PLUGINS)}"
    )
    return parser


def command_line(arguments: Sequence[str]) -> tuple[configargparse.ArgumentParser, Loaded]:
    """Return the parser for ``arguments``, with the flags of their plugins, and the plugins. Raises StartupError."""
    parser = _parser()
    first, _ = parser.parse_known_args(list(arguments))
    loaded = _load(first)
    parser.add_argument(
        "-h", "--help", action="help", help="show all flags of the core and of the loaded plugins, and exit"
    )
    add_core_options(parser)
    loaded.add_options(parser)
    _refuse_left_out(parser, loaded)
    return parser, loaded


def _refuse_left_out(parser: configargparse.ArgumentParser, loaded: Loaded) -> None:
    """Let ``parser`` refuse the flags of default plugins that are not loaded, also in the environment and in a file.

    Otherwise an API key could be set, and not be checked.
    """
    for name in DEFAULT_PLUGINS:
        if all(source.name != name for source in loaded.sources):
            for action in _flags_of(name):
                flags = [flag for flag in action.option_strings if flag not in parser._option_string_actions]
                if flags and action.help is not argparse.SUPPRESS:
                    # ConfigArgParse must know a switch as one, to read its value from the environment and files.
                    kind = _LeftOutSwitch if action.nargs == 0 else _LeftOut
                    given = {} if action.nargs == 0 else {"nargs": action.nargs}
                    given |= {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                    parser.add_argument(*flags, action=kind, const=name, **given)


def _flags_of(plugin: str) -> list[argparse.Action]:
    """Return the flags that ``plugin`` adds. Raises StartupError."""
    own = argparse.ArgumentParser(add_help=False)
    load([plugin], ()).add_options(own)
    return own._actions


def _unknown(name: str, parser: argparse.ArgumentParser, loaded: Loaded) -> str:
    """Return a message about an unknown flag: the plugin that it belongs to, else the most similar flags."""
    for plugin in sorted(installed_plugins().keys() - {source.name for source in loaded.sources}):
        with suppress(StartupError):
            if any(name in action.option_strings for action in _flags_of(plugin)):
                return _NOT_LOADED.format(name, plugin)
    known = [flag for flag, of in parser._option_string_actions.items() if of.help is not argparse.SUPPRESS]
    similar = ", ".join(difflib.get_close_matches(name, known)) or "none"
    return f"unknown flag or value {name!r}; similar flags: {similar} (--help shows all)"


class _LeftOut(argparse.Action):
    """A flag of the default plugin ``const``, which is not loaded."""

    def __call__(self, *_: object) -> NoReturn:
        name = f"{self.option_strings[0]} ({self.env_var})"  # type: ignore[attr-defined]  # ConfigArgParse sets it
        raise SettingsError(_NOT_LOADED.format(name, self.const))


class _LeftOutSwitch(_LeftOut, argparse._StoreTrueAction):
    """The same for a flag without a value."""

    def __init__(self, option_strings: Sequence[str], *, const: str, **rest: Any) -> None:
        super().__init__(option_strings, **rest)
        self.const = const


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A parsed command line, checked as far as the core understands it."""

    settings: Settings
    options: argparse.Namespace
    loaded: Loaded

    @classmethod
    def by(cls, arguments: Sequence[str]) -> _Wanted:
        """Parse ``arguments``. Raises StartupError."""
        parser, loaded = command_line(arguments)
        options, unknown = parser.parse_known_args(list(arguments))
        if unknown:
            # Without the value: if the flag is a misspelt one for a key, the value is secret.
            raise SettingsError(_unknown(unknown[0].partition("=")[0], parser, loaded))
        return cls(Settings.from_options(options), options, loaded)

    def build(self) -> tuple[Router, ASGIApp]:
        """Make the router and its application. Raises StartupError."""
        router = Router(self.settings, self.loaded.make(self.options), self.options)
        app = make_app(router, self.loaded.middleware)
        if names := self.settings.request_id_headers:
            app = RequestIds(app, names)
        if origins := self.settings.cors_allowed_origins:
            app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        return router, app


def build(arguments: Sequence[str]) -> tuple[Router, ASGIApp]:
    """Make a router and its application from the command line ``arguments``. Raises StartupError."""
    return _Wanted.by(arguments).build()


def is_compiled() -> bool:
    """Return True in a package that was built with ``SLIME_ROUTER_COMPILE=1``."""
    return not str(proxy.__file__).endswith(".py")


def _load(first: argparse.Namespace) -> Loaded:
    defaults = () if first.no_default_plugins else DEFAULT_PLUGINS
    return load([*defaults, *first.plugin], first.middleware_paths)


def _list_plugins() -> int:
    installed = installed_plugins()
    width = max(map(len, installed), default=0)
    for name, point in installed.items():
        where = point.dist.name if point.dist is not None else "?"
        note = "  (default)" if name in DEFAULT_PLUGINS else ""
        sys.stdout.write(f"{name:{width}}  {point.value}  [{where}]{note}\n")
    return 0


def _serve(arguments: Sequence[str]) -> int:
    wanted = _Wanted.by(arguments)
    settings = wanted.settings
    start_logging(settings)
    if is_compiled():
        logger.info("the hot modules are compiled")
    router, app = wanted.build()
    try:
        sock = bind(settings.host, settings.port)
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from None
    if "worker_addresses" not in router.components:
        logger.warning(
            "the plugin auth is not loaded: no key is required, and any server may be a worker,"
            " unless another plugin adds such checks"
        )
    tls = {"ssl_certfile": settings.tls_cert_path, "ssl_keyfile": settings.tls_key_path}
    try:
        run(
            app, sock, grace_s=settings.shutdown_grace_s, client_timeout_s=settings.client_timeout_s,
            on_stop=router.stop, **tls,
        )  # fmt: skip
    except ssl.SSLError as error:
        raise SettingsError(f"--tls-cert-path and --tls-key-path cannot be used: {error}") from None
    return 0


def _command(name: str, arguments: Sequence[str]) -> int:
    if name == "plugins":
        if arguments:
            raise SettingsError(f"plugins takes no flags, got {arguments[0]!r}")
        return _list_plugins()
    commands = {point.name: point for point in entry_points(group=f"{PROJECT}.commands")}
    if name not in commands:
        known = ", ".join(sorted({"plugins", *commands}))
        raise SettingsError(f"unknown command {name!r}; known: {known} (none: start the router)")
    try:
        command = commands[name].load()
    except Exception as error:
        raise StartupError(f"command {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return int(command(arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``slime-router``; returns the exit code, 2 for a command line that cannot work."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and not arguments[0].startswith("-"):
            return _command(arguments[0], arguments[1:])
        return _serve(arguments)
    except StartupError as error:
        if sys.flags.dev_mode and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        sys.stderr.write(f"slime-router: {' '.join(str(error).split())}\n")
        return 2
