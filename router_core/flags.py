"""Flags declared as fields of a settings dataclass, with name, default, limits and help in one place."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from router_core.errors import SettingsError

__all__ = ["add_flags", "flag", "read_flags"]

T = TypeVar("T")

_KEY = "slime_router.flag"


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag. Limits of a number: ``above``, or ``at_least`` and perhaps ``at_most``; ``finite`` excludes infinity."""

    names: tuple[str, ...]
    help: str
    above: float | None
    at_least: float | None
    at_most: float | None
    finite: bool
    options: dict[str, Any]

    @property
    def dest(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")

    def objection(self, value: Any) -> str | None:
        """Return None when ``value`` is within the limits, else a description of the allowed values."""
        if value is None:
            return None
        too_large = self.finite and value == math.inf
        if self.above is not None and (too_large or not value > self.above):
            return f"a number above {self.above:g}"
        most = math.inf if self.at_most is None else self.at_most
        if self.at_least is not None and (too_large or not self.at_least <= value <= most):
            return f"{self.at_least:g} " + ("or more" if self.at_most is None else f"to {most:g}")
        return None


def flag(
    *names: str,
    default: Any = None,
    help: str,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
    **options: Any,
) -> Any:
    """Make a dataclass field for the flag ``names[0]``; further ``names`` are aliases, ``options`` are argparse's.

    A default of False makes a switch. A number as default sets the flag's ``type``, unless ``options`` have one. With a
    tuple as default, the value is a tuple. The help page adds the default, unless ``help`` contains ``(default``, or
    the default is None, empty, zero or False.
    """
    return field(
        default=default, metadata={_KEY: _Flag(names, help, above, at_least, at_most, finite, options)}
    )


def _flags_of(settings: Any) -> list[tuple[str, Any, _Flag]]:
    """Return ``(field name, default, flag)`` for each flag of a dataclass."""
    return [
        (each.name, each.default, each.metadata[_KEY]) for each in fields(settings) if _KEY in each.metadata
    ]


def add_flags(parser: argparse._ActionsContainer, settings: type[Any]) -> None:
    """Add the flags of ``settings``, a dataclass, to ``parser``."""
    for _, default, about in _flags_of(settings):
        options = {"default": list(default) if isinstance(default, tuple) else default, **about.options}
        if default is False:
            options.setdefault("action", "store_true")
        elif isinstance(default, int | float):
            options.setdefault("type", type(default))
        is_shown = default not in (None, False, "", ()) and "(default" not in about.help
        parser.add_argument(
            *about.names, help=about.help + (" (default: %(default)s)" if is_shown else ""), **options
        )


def read_flags(settings: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Make ``settings``, a dataclass, from the parsed command line; ``others`` add fields, or replace parsed values.

    Raises SettingsError for a number outside its limits.
    """
    flags = _flags_of(settings)
    given = {name: getattr(options, about.dest) for name, _, about in flags}
    tuples = {name: tuple(given[name]) for name, default, _ in flags if isinstance(default, tuple)}
    made = settings(**given | tuples | others)
    for name, _, about in flags:
        value = getattr(made, name)
        wanted = about.objection(value)
        if wanted is not None:
            raise SettingsError(f"{about.names[0]}: wanted {wanted}, got {value}")
    return made
