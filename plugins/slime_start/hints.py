"""Messages for words on the command line that are no flags: commands, plugins, paths, and values that no flag takes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence

from slime_start.suggestions import closest

#: Dashes that word processors and chat programs make of hyphens.
_DASHES = (
    "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}\N{EM DASH}\N{HORIZONTAL BAR}\N{MINUS SIGN}"
)

__all__ = ["path_cure", "stray_word", "unknown_command", "unknown_plugin"]


def unknown_command(name: str, commands: Collection[str], plugins: Collection[str]) -> str:
    """Return a message about ``name``: the first word of a command line, but no command."""
    if name[:1] in _DASHES:
        return _wrong_dash(name)
    if "://" in name:
        return f"a worker's URL belongs after a flag: --worker-urls {name}"
    if name in plugins:
        return f"{name} is a plugin, not a command: --plugin {name}"
    found = closest(name, [*commands, "--help", "--version"])
    hint = f": did you mean {found}?" if found is not None else ";"
    return f"unknown command {name!r}{hint} known: {', '.join(sorted(commands))} (without a command, the router starts)"


def _wrong_dash(word: str) -> str:
    flag = f"--{word.partition('=')[0].lstrip(_DASHES + '-')}"
    return f"a flag begins with two hyphens, and not with the dash {word[0]!r}: {flag}"


def unknown_plugin(name: str, installed: Collection[str]) -> str:
    """Return a message about ``name``, which no installed plugin has."""
    known = f"(installed: {', '.join(installed) or 'none'})"
    if name.startswith("[") and not name.endswith("]"):
        return f"--plugin: wanted ] at the end of the list, got {name!r}"
    names = re.findall(r"[^\s,]+", name)
    if not names:
        return f"--plugin: wanted a name, got {name!r} {known}"
    if len(names) > 1:
        flags = " ".join(f"--plugin {each}" for each in names)
        return f"no plugin {name!r}: give one name each, {flags}, or [{', '.join(names)}] in a file or a variable"
    if re.search(r"[./:]", name):
        return f"no plugin {name!r}: a dotted path belongs after --middleware-paths {known}"
    found = closest(name.removeprefix("slime_"), installed)
    return f"no plugin {name!r}{f': did you mean {found}?' if found is not None else ''} {known}"


def path_cure(path: str, installed: Collection[str]) -> str:
    """Return a hint for ``path`` of ``--middleware-paths``, which cannot be imported."""
    if path in installed:
        return f"; it is a plugin: --plugin {path}"
    if "/" in path or path.endswith(".py"):
        return "; wanted a dotted path such as package.module.Class, with its directory in PYTHONPATH"
    return "; is its directory in PYTHONPATH?"


def stray_word(
    word: str, arguments: Sequence[str], commands: Collection[str], flags: Mapping[str, argparse.Action]
) -> str:
    """Return a message about ``word``, which is neither a flag nor a flag's value. It quotes no value."""
    if word[:1] in _DASHES:
        return _wrong_dash(word)
    if word in commands:
        return f"a command comes first: slime-router {word} ..."
    before = arguments[: arguments.index(word)] if word in arguments else []
    given = [each.partition("=")[0] for each in before if each.startswith("--")]
    if not given:
        return "a value without a flag (--help shows all flags)"
    if given[-1] in flags and flags[given[-1]].nargs == 0:
        return f"{given[-1]}: a switch takes no value; give it alone"
    return f"{given[-1]}: a value too many; put a value that has spaces in quotes"
