"""A parser of flags from the command line, the environment and a file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn

import configargparse

from slime_start.release import release
from slime_start.suggestions import belongs, closest

__all__ = ["PREFIX", "LeftOut", "Parser", "leave_out", "plainly"]

#: The beginning of the name of each environment variable that sets a flag.
PREFIX = "SLIME_ROUTER_"
_FILE, _ENVIRONMENT = "config_file|", "environment_variables"
_FLAG = re.compile(r"(?:argument )?(--[a-z0-9-]+)(?:/--[a-z0-9-]+)*:? ")
_INVALID = re.compile(r"argument (\S+): invalid (\w+) value: (.*)", re.DOTALL)
_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
_COUNT = re.compile(r"argument (\S+): expected (one|at least one|\d+) arguments?")
_SWITCH = re.compile(r"argument (\S+): ignored explicit argument")
_NO_FILE = re.compile(r"Unable to open config file: (.*)\. Error: \[Errno \d+\] ([^:]*)", re.DOTALL)
_WANTED = {"int": "a whole number", "float": "a number"}
#: The value of a variable that Kubernetes sets for a service, as a message quotes it.
_SERVICE = re.compile(r"'(tcp|udp|sctp)://")


class Parser(configargparse.ArgumentParser):  # type: ignore[misc]  # the library has no types
    """Raises ``failure`` for a mistake, with a message that says where the value comes from.

    A new parser has the flags that are needed to load plugins. Parse once with these. Then add all other flags, and
    those of :meth:`add_ends`, and parse again.
    """

    def __init__(self, default_plugins: Sequence[str], *, failure: type[Exception]) -> None:
        super().__init__(
            prog="slime-router",
            usage="slime-router [flags]\n       slime-router COMMAND [flags]",
            description="The router between RL rollouts and their inference engines: text in, exact tokens out.",
            auto_env_var_prefix=PREFIX,
            add_config_file_help=False,
            add_env_var_help=False,
            add_help=False,
            allow_abbrev=False,
            # argparse makes a formatter for each flag, and asks the terminal for its width each time
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, width=get_terminal_size().columns - 2
            ),
        )
        self._failure = failure
        self.add_argument(
            "--config", is_config_file_arg=True, metavar="FILE",
            help="a file of flags, one 'name = value' a line",
        )  # fmt: skip
        self.add_argument(
            "--plugin", action="append", default=[], metavar="NAME",
            help="load an installed plugin; may be repeated",
        )  # fmt: skip
        self.add_argument(
            "--middleware-paths", "--slime-router-middleware-paths", nargs="*", action="extend", default=[],
            metavar="PATH", help="dotted paths of plugins, or of ASGI middleware classes",
        )  # fmt: skip
        self.add_argument(
            "--no-default-plugins", action="store_true", help=f"do not load {', '.join(default_plugins)}"
        )

    def add_ends(self) -> None:
        """Add the flags that print something and exit."""
        shown = "the flags of the router and of the plugins that are loaded"
        self.add_argument("-h", "--help", action="help", help=f"show {shown}, and exit")
        version = f"slime-router {release()}"
        self.add_argument("--version", action="version", version=version, help="show the version, and exit")

    def error(self, message: str) -> NoReturn:
        raise self._failure(self.with_source(plainly(message, self._option_string_actions)))

    def with_source(self, message: str) -> str:
        """Append to ``message`` the variable or file, if any, that has set the flag with which ``message`` begins."""
        flag = _FLAG.match(message)
        for source, settings in self._sources().items():
            for key, (action, _) in settings.items():
                if flag is None or action is None or flag[1] not in action.option_strings:
                    continue
                if source.startswith(_FILE):
                    return f"{message} (in {source.removeprefix(_FILE)})"
                if source == _ENVIRONMENT and key not in message:
                    cure = "; Kubernetes sets it for a service of this name: rename the service, or give "
                    return f"{message} ({key}{cure + flag[1] if _SERVICE.search(message) else ''})"
        return message

    def _sources(self) -> Mapping[str, Mapping[str, tuple[argparse.Action | None, Any]]]:
        found: dict[str, Any] = getattr(self, "_source_to_settings", {})
        return {name: settings for name, settings in found.items() if name.startswith((_FILE, _ENVIRONMENT))}

    @property
    def unknown_keys(self) -> list[tuple[str, str]]:
        """``(file, key)`` of each key that is no flag, in the files of the last parsing."""
        sources = [
            (name.removeprefix(_FILE), settings)
            for name, settings in self._sources().items()
            if name.startswith(_FILE)
        ]
        return [(file, key) for file, keys in sources for key, (action, _) in keys.items() if action is None]

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """All flags that ``--help`` shows, except ``--help`` and ``--version``."""
        known: dict[str, argparse.Action] = self._option_string_actions
        ends = argparse._HelpAction | argparse._VersionAction
        return {
            flag: action
            for flag, action in known.items()
            if action.help is not argparse.SUPPRESS and not isinstance(action, ends)
        }

    @property
    def variables(self) -> set[str]:
        """The variables that were read by the last parsing, whether they were set or not."""
        return {action.env_var for action in self._actions if action.env_var}

    def variable_of(self, flag: str) -> str | None:
        """Return the variable of ``flag``, or None."""
        found: str | None = self._option_string_actions[flag].env_var
        return found

    def as_variable(self, flag: str) -> str:
        """Return the variable that is spelled like ``flag``."""
        return PREFIX + flag.lstrip("-").upper().replace("-", "_")

    @contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Append the source of a flag, see :meth:`with_source`, to the message of a failure within the block."""
        try:
            yield
        except self._failure as error:
            error.args = (self.with_source(str(error)),)
            raise


def plainly(message: str, flags: Mapping[str, argparse.Action]) -> str:
    """Reword a ``message`` of argparse about one of ``flags``: say what was wanted and found.

    A message of an unknown form only loses its first word, ``argument``.
    """
    if found := _INVALID.fullmatch(message):
        flag = _with_metavar(found[1], flags)
        return f"{flag}: wanted {_WANTED.get(found[2], f'a {found[2]}')}, got {found[3]}"
    if found := _CHOICE.fullmatch(message):
        known = [name.strip("'") for name in found[3].split(", ")]
        near = closest(found[2], known)
        hint = f": did you mean {near}?" if near is not None else ";"
        return f"{found[1]}: no such value {found[2]!r}{hint} known: {', '.join(known)}"
    if found := _COUNT.match(message):
        values = (
            "a value" if found[2] == "one" else f"{found[2]} value{'' if found[2].endswith('one') else 's'}"
        )
        return f"{_with_metavar(found[1], flags)}: wanted {values} after it"
    if found := _SWITCH.match(message):
        return f"{found[1]}: a switch takes no value; give it alone"
    if found := _NO_FILE.match(message):
        wanted = "a text file with a line such as port = 30000 for each flag (--help shows the names)"
        return f"--config {Path(found[1])}: {found[2].strip()}; wanted {wanted}"
    return message.removeprefix("argument ")


def _with_metavar(names: str, flags: Mapping[str, argparse.Action]) -> str:
    """Return the flag as it is written with its value, as in ``--state-dir DIR``; ``names`` are all its names."""
    name = names.partition("/")[0]
    metavar = flags[name].metavar if name in flags else None
    return " ".join([name, *([metavar] if isinstance(metavar, str) else metavar or ())])


class LeftOut(argparse.Action):
    """A flag of the plugin ``const``, which is not loaded."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        name = f"{self.option_strings[0]} ({self.env_var})"  # type: ignore[attr-defined]  # ConfigArgParse sets it
        parser.error(belongs(name, str(self.const)))


class _LeftOutSwitch(LeftOut, argparse._StoreTrueAction):
    """A :class:`LeftOut` for a flag without a value."""

    def __init__(self, option_strings: Sequence[str], *, const: str, **rest: Any) -> None:
        super().__init__(option_strings, **rest)
        self.const = const


def leave_out(parser: Parser, plugin: str, actions: Sequence[argparse.Action]) -> None:
    """Let ``parser`` refuse the flags ``actions`` of ``plugin``, also in the environment and in a file."""
    for action in actions:
        flags = [flag for flag in action.option_strings if flag not in parser._option_string_actions]
        if flags and action.help is not argparse.SUPPRESS:
            # To read a switch from the environment and files, ConfigArgParse must know that it takes no value.
            kind = _LeftOutSwitch if action.nargs == 0 else LeftOut
            given: dict[str, Any] = {} if action.nargs == 0 else {"nargs": action.nargs}
            given |= {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(*flags, action=kind, const=plugin, **given)
