"""Messages for words of the command line, keys of a file and variables that are no flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from slime_start.environment import unknown_variables
from slime_start.hints import stray_word
from slime_start.parsing import PREFIX, Parser
from slime_start.suggestions import unknown_name

__all__ = ["complaint"]


def complaint(
    parser: Parser,
    arguments: Sequence[str],
    left: Sequence[str],
    environment: Mapping[str, str],
    commands: Collection[str],
    find_elsewhere: Callable[[], Mapping[str, str]],
) -> str | None:
    """Return a message about the first key, else word, else variable that is no flag of ``parser``; else None.

    ``left`` are the words that the parser did not know, and ``find_elsewhere`` returns the flags of plugins that are
    not loaded, each with its plugin. A variable that is like no flag is allowed: it may be there for other reasons.
    """
    flags = parser.flags
    variables = unknown_variables(environment, PREFIX, parser.variables)
    if not (left or variables):
        return None
    elsewhere = find_elsewhere()
    for file, key in parser.unknown_keys:
        message = unknown_name("key", f"--{key}", flags, elsewhere, lambda flag: flag[2:])
        return f"{file}: {message or f'unknown key {key!r}; wanted name = value (--help shows the names)'}"
    for word in left:
        if not word.startswith("-"):
            return stray_word(word, arguments, commands, flags)
        name = word.partition("=")[0]  # without the value, which may be a secret key
        return unknown_name("flag", name, flags, elsewhere) or f"unknown flag {name} (--help shows all flags)"
    for variable in variables:
        flag = "--" + variable.upper().removeprefix(PREFIX).lower().replace("_", "-")
        if flag in flags:
            read = parser.variable_of(flag)
            return f"{variable} is not read: {f'set {read}' if read else f'give {flag} on the command line'}"
        message = unknown_name("variable", flag, flags, elsewhere, parser.as_variable)
        if message is not None:
            return message
    return None
