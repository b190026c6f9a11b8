"""Reference of all flags, from the parser that reads them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from unittest.mock import patch

from docs.generate.tables import Table, code, text
from router_core.cli import command_line
from router_core.hookspecs import PROJECT
from router_core.loader import installed_plugins
from slime_sglang.gateway_flags import FLAGS
from slime_start.default_plugins import DEFAULT_PLUGINS
from slime_start.help_page import about_point
from slime_start.parsing import LeftOut, Parser

_INTRODUCTION = """\
# Flags

Made from the parser. `slime-router --plugin NAME --help` prints the same for the plugins that you load.

Each flag but `--config` can also be a variable of the environment, or `name = value` in a `--config` file.
The command line overrides the environment, which overrides the file.
In the environment and in the file, lists are written `[a, b]`.
Flags with a "yes" in the last column are flags of the SGLang gateway (sglang-router 0.3.2) too.

"""

_DEFAULT = re.compile(r" \(default:? ([^()]*)\)")


def page(gateway: frozenset[str]) -> str:
    """Return the page. ``gateway``: the fields of the SGLang gateway's arguments."""
    core = _parser()
    known = [action for action in core._actions if not isinstance(action, LeftOut)]
    seen = {name for action in known for name in action.option_strings}
    sections = [_section("The router", "", core, known, gateway)]
    for name, point in _plugins():
        parser = _parser(name)
        own = [action for action in parser._actions if not seen & set(action.option_strings)]
        loaded = "Loaded by default." if name in DEFAULT_PLUGINS else f"Loaded with `--plugin {name}`."
        about = f"{text(about_point(point))}. {loaded} [The page of the plugin](../plugins/{name}.md)."
        if own:
            sections.append(_section(name, about, parser, own, gateway))
    for command in _commands():
        about = f"{text(about_point(command))}. `slime-router {command.name} --help` prints the same."
        made = _parser_of(command)
        sections.append(_section(f"slime-router {command.name}", about, made, made._actions, frozenset()))
    return _INTRODUCTION + "\n".join([*sections, _without_effect()])


def _plugins() -> Iterator[tuple[str, EntryPoint]]:
    """Yield the plugins of this distribution, those that are loaded by default last."""
    found = installed_plugins()
    for name in sorted(found, key=lambda name: (name in DEFAULT_PLUGINS, name)):
        source = found[name].dist
        if source is not None and source.name == "slime-router":
            yield name, found[name]


def _commands() -> list[EntryPoint]:
    found = entry_points(group=f"{PROJECT}.commands")
    return sorted(point for point in found if point.dist is not None and point.dist.name == "slime-router")


class _Made(Exception):
    """Carries the parser that a command has made for its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser)
        self.parser = parser


def _parser_of(command: EntryPoint) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Made(parser)

    with patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            command.load()([])
        except _Made as made:
            return made.parser
    raise SystemExit(f"slime-router {command.name} parses no arguments")


def _parser(*plugins: str) -> Parser:
    arguments = [part for name in plugins for part in ("--plugin", name)]
    parser, _ = command_line(["--no-default-plugins", *arguments])
    parser.parse_known_args([], env_vars={})  # gives each flag its variable
    return parser


def _section(
    title: str,
    about: str,
    parser: argparse.ArgumentParser,
    actions: list[argparse.Action],
    gateway: frozenset[str],
) -> str:
    table = Table("flag, variable", "default", "", "gateway")
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, LeftOut) or not action.option_strings:
            continue
        names = [code(name) for name in action.option_strings]
        if action.nargs != 0:
            names[-1] = code(f"{action.option_strings[-1]} {_value(action)}")
        long = [name for name in action.option_strings if name.startswith("--")]
        variable = parser.variable_of(long[0]) if isinstance(parser, Parser) else None
        same = any(name[2:].replace("-", "_") in gateway for name in long)
        default, about_flag = _default_and_help(action)
        spellings = [*names, *([code(variable)] if variable else [])]
        table.add("<br>".join(spellings), default, about_flag, "yes" if same else "")
    return f"## {title}\n\n{about}\n\n{table}" if about else f"## {title}\n\n{table}"


def _value(action: argparse.Action) -> str:
    name = action.metavar or action.dest.upper().rpartition("_")[2]
    words = " ".join(name) if isinstance(name, tuple) else str(name)
    return f"{words} ..." if action.nargs in ("*", "+") else words


def _default_and_help(action: argparse.Action) -> tuple[str, str]:
    """Return the default that the help names, else the parser's (empty for none), and the help without the default."""
    words = (action.help or "") % {"default": action.default, "prog": "slime-router"}
    if action.choices is not None:
        words += f"; one of {', '.join(map(str, action.choices))}"
    told = _DEFAULT.search(words)
    if told:
        return text(told[1]), text(_DEFAULT.sub("", words, count=1))
    value = action.default
    if not value or value in (True, argparse.SUPPRESS):
        return "", text(words)
    return text(" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)), text(words)


def _without_effect() -> str:
    table = Table("flag", "", "why")
    for flag in FLAGS:
        table.add(code(flag.name), "refused" if flag.refused else "accepted", text(flag.why))
    return (
        "## Flags of the SGLang gateway without effect\n\n"
        "The plugin [sglang](../plugins/sglang.md) knows them, so that launch lines of sglang-router 0.3.2 work. "
        "A refused flag would change how requests are handled: the router does not start with it.\n\n"
        f"{table}"
    )
