"""The page of ``--help``: flags by plugin, and the commands."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint

from slime_start.default_plugins import DEFAULT_PLUGINS

__all__ = ["about", "about_point", "epilog", "grouped", "plugin_list", "table"]

_SOURCES = (
    "Each flag but --config can also be SLIME_ROUTER_<FLAG> in the environment, or 'name = value' in a --config file.\n"
    "The command line overrides the environment, which overrides the file.\n"
    "In the environment and in the file, lists are written [a, b]."
)


def about(*objects: object) -> str:
    """Return the first line of the first docstring of ``objects``, as plain text; empty if none has a docstring."""
    text = next(filter(None, map(inspect.getdoc, objects)), "")
    return text.partition("\n")[0].replace("``", "").rstrip(".")


def about_point(point: EntryPoint) -> str:
    """Return what a plugin or a command does, from the docstring of its package; empty when it cannot be imported."""
    with suppress(Exception):  # the error is reported when the plugin is loaded
        return about(importlib.import_module(point.module.partition(".")[0]))
    return ""


@contextmanager
def grouped(parser: argparse.ArgumentParser, title: str, description: str = "") -> Iterator[None]:
    """Put all flags that are added within the block into one group of the help page.

    If an earlier group has one of these flags already, the message of the error gets the name of that group.
    """
    loose, groups = parser._optionals._group_actions, parser._action_groups
    flags, before = len(loose), len(groups)
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, argparse.ArgumentError):
            words = error.__cause__.message.replace(",", "").split()
            for group in groups[:before]:
                if any(flag in words for action in group._group_actions for flag in action.option_strings):
                    error.args = (f"{error}; {group.title} has it already: is one plugin loaded twice?",)
        raise
    made = groups[before:]
    added = [*loose[flags:], *(action for group in made for action in group._group_actions)]
    del loose[flags:], groups[before:]
    if added:
        parser.add_argument_group(title, description or None)._group_actions.extend(added)


def epilog(commands: Mapping[str, str], plugins: Mapping[str, str]) -> str:
    """Return the end of the page, with what ``commands`` do, and ``plugins`` that are not loaded."""
    lines = ["commands, with flags of their own (slime-router COMMAND --help):", *_rows(commands)]
    if plugins:
        lines += [
            "",
            "plugins that are not loaded (--plugin NAME --help shows their flags):",
            *_rows(plugins),
        ]
    return "\n".join([*lines, "", _SOURCES])


def _rows(abouts: Mapping[str, str]) -> list[str]:
    return [f"  {line}" for line in table(sorted(abouts.items()))]


def plugin_list(points: Mapping[str, EntryPoint]) -> str:
    """Return a line for each installed plugin, with its purpose, and its distribution unless it is a default plugin."""
    rows = []
    for name, point in points.items():
        source = "default" if name in DEFAULT_PLUGINS else point.dist.name if point.dist else "?"
        rows.append((f"{name} ({source})", about_point(point)))
    return "".join(f"{line}\n" for line in table(rows))


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each of ``rows``, with the second column aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:{width}}  {text}".rstrip() for name, text in rows]
