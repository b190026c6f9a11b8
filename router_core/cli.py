"""The command ``slime-router``.

The command line is parsed twice: first for the names of plugins, then with the flags of these plugins.
A failed start prints one line with the reason; ``PYTHONDEVMODE=1`` adds the traceback for authors of plugins.
"""

from __future__ import annotations

import argparse
import logging
import os
import ssl
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint

from starlette.middleware.cors import CORSMiddleware

from router_core import proxy
from router_core.app import make_app
from router_core.errors import SettingsError, StartupError
from router_core.hookspecs import PROJECT
from router_core.loader import Loaded, installed_plugins, load
from router_core.logs import start_logging
from router_core.request_ids import RequestIds
from router_core.router import Router
from router_core.settings import Settings, add_core_options
from router_core.types import ASGIApp, Receive, Scope, Send
from slime_http.serving import bind, run
from slime_start.banner import banner
from slime_start.certificates import cause
from slime_start.complaints import complaint
from slime_start.default_plugins import DEFAULT_PLUGINS
from slime_start.help_page import about_point, epilog, grouped, plugin_list
from slime_start.hints import unknown_command
from slime_start.installed import entry_points
from slime_start.interrupts import raise_again
from slime_start.parsing import Parser, leave_out

__all__ = ["build", "command_line", "is_compiled", "main"]

logger = logging.getLogger(__name__)
_PLUGINS = {"plugins": "List the installed plugins"}


def command_line(arguments: Sequence[str]) -> tuple[Parser, Loaded]:
    """Return a parser with the flags of the plugins that ``arguments`` load, and these plugins. Raises StartupError."""
    parser = Parser(DEFAULT_PLUGINS, failure=SettingsError)
    first, _ = parser.parse_known_args(list(arguments))
    defaults = [name for name in DEFAULT_PLUGINS if name in first.plugin or not first.no_default_plugins]
    loaded = load([*defaults, *first.plugin], first.middleware_paths)
    parser.add_ends()
    with grouped(parser, "router"):
        add_core_options(parser)
    loaded.add_options(parser)
    for name in DEFAULT_PLUGINS:
        # The flags of a default plugin that is left out are refused: ``--api-key`` without auth protects nothing.
        if name not in loaded.names:
            leave_out(parser, name, _flags_of(name))
    if {"-h", "--help"} & set(arguments):
        parser.epilog = _epilog(loaded)
    return parser, loaded


def _flags_of(plugin: str) -> list[argparse.Action]:
    """Return the flags that ``plugin`` adds. Raises StartupError."""
    own = argparse.ArgumentParser(add_help=False)
    load([plugin], ()).add_options(own)
    return own._actions


def _flags_elsewhere(loaded: Loaded) -> dict[str, str]:
    """Return the flags of the installed plugins that are not loaded, each with its plugin."""
    found: dict[str, str] = {}
    for plugin in sorted(installed_plugins().keys() - loaded.names):
        with suppress(StartupError):
            found |= {flag: plugin for action in _flags_of(plugin) for flag in action.option_strings}
    return found


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A parsed command line without unknown flags; the core's flags are checked."""

    settings: Settings
    options: argparse.Namespace
    loaded: Loaded
    parser: Parser

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> _Parsed:
        """Parse ``arguments``. Raises StartupError."""
        parser, loaded = command_line(arguments)
        options, unknown = parser.parse_known_args(list(arguments))
        elsewhere = partial(_flags_elsewhere, loaded)
        wrong = complaint(parser, arguments, unknown, os.environ, _commands(), elsewhere)
        if wrong is not None:
            raise SettingsError(wrong)
        with parser.naming_sources():
            return cls(Settings.from_options(options), options, loaded, parser)

    def build(self) -> tuple[Router, ASGIApp]:
        """Make the router and its application. Raises StartupError."""
        with self.parser.naming_sources():
            router = Router(self.settings, self.loaded.make(self.options), self.options)
        app = make_app(router, self.loaded.middleware)
        if names := self.settings.request_id_headers:
            app = RequestIds(app, names)
        if origins := self.settings.cors_allowed_origins:
            app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        return router, app

    def banner(self, router: Router, url: str) -> list[str]:
        """Return the lines of the start banner: version, plugins, policies, workers and pages."""
        abouts = {source.name: source.about for source in self.loaded.sources}
        policy, pages = getattr(self.options, "policy", ""), router.components.find("pages")
        policies = [policy if name == "policies" else f"plugin {name}" for name in router.hooks.choosers]
        plugins = {name: abouts[name] for name in router.hooks.plugins}
        return banner(url, plugins, policies, [worker.url for worker in router.pool], pages)


def build(arguments: Sequence[str]) -> tuple[Router, ASGIApp]:
    """Make a router and its application from the command line ``arguments``. Raises StartupError."""
    router, app = _Parsed.parse(arguments).build()

    async def recognised(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)  # servers recognise ASGI 3 by "async def"

    return router, recognised


def is_compiled() -> bool:
    """Return True in a package that was built with ``SLIME_ROUTER_COMPILE=1``."""
    return not str(proxy.__file__).endswith(".py")


def _commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"{PROJECT}.commands")}


def _epilog(loaded: Loaded) -> str:
    commands = {name: about_point(point) for name, point in _commands().items()} | _PLUGINS
    installed = installed_plugins()
    return epilog(commands, {name: about_point(installed[name]) for name in installed.keys() - loaded.names})


def _serve(arguments: Sequence[str]) -> int:
    parsed = _Parsed.parse(arguments)
    settings = parsed.settings
    start_logging(settings)
    if is_compiled():
        logger.info("the hot modules are compiled")
    router, app = parsed.build()
    try:
        sock = bind(settings.host, settings.port)
    except OSError as error:
        reason = f"{error.strerror or error}; give another --port or --host"
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from None
    if "worker_addresses" not in router.components:
        logger.warning(
            "the plugin auth is not loaded: no key is required, and any server may be a worker,"
            " unless another plugin checks requests and workers"
        )

    def tell(url: str) -> None:
        for line in parsed.banner(router, url):
            logger.info("%s", line)

    tls = {"ssl_certfile": settings.tls_cert_path, "ssl_keyfile": settings.tls_key_path}
    try:
        run(
            app, sock, grace_s=settings.shutdown_grace_s, client_timeout_s=settings.client_timeout_s,
            on_start=tell, on_stop=router.stop, **tls,
        )  # fmt: skip
    except ssl.SSLError as error:
        raise SettingsError(f"--tls-cert-path and --tls-key-path: {cause(error)}") from None
    return 0


def _command(name: str, arguments: Sequence[str]) -> int:
    if name == "help":
        return main([*arguments, "--help"])
    if name == "plugins":
        if arguments:
            raise SettingsError(f"plugins takes no flags, got {arguments[0]!r}")
        sys.stdout.write(plugin_list(installed_plugins()))
        return 0
    commands = _commands()
    if name not in commands:
        raise SettingsError(unknown_command(name, {"plugins", *commands}, installed_plugins()))
    try:
        command = commands[name].load()
    except Exception as error:
        raise StartupError(f"command {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    raise_again()
    return int(command(arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``slime-router``. Returns the exit code: 2 when it cannot start, such as for an unknown flag."""
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
