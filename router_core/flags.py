"""Flags that are the fields of a settings dataclass: name, default, limits and help stand in one place."""

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
    """Of a number: it is ``above``, ``at_least`` and ``at_most`` these, and finite unless that is said."""

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
        """Return a description of the wanted values when ``value`` is not one of them; None when it is."""
        if value is None:
            return None
        endless = self.finite and value == math.inf
        if self.above is not None and (endless or not value > self.above):
            return f"a number above {self.above:g}"
        most = math.inf if self.at_most is None else self.at_most
        if self.at_least is not None and (endless or not self.at_least <= value <= most):
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
    """A field of a dataclass that is the flag ``names[0]``, with other ``names``.

    False makes a switch; of a number the ``type`` is that of ``default``; ``options`` are argparse's. The help ends
    with the default, unless it tells it itself.
    """
    return field(
        default=default, metadata={_KEY: _Flag(names, help, above, at_least, at_most, finite, options)}
    )


def _flags_of(settings: Any) -> list[tuple[str, Any, _Flag]]:
    """``(field, default, flag)`` of a dataclass."""
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
        told = default in (None, False, "", ()) or "(default" in about.help
        parser.add_argument(
            *about.names, help=about.help + ("" if told else " (default: %(default)s)"), **options
        )


def read_flags(settings: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Make ``settings``, a dataclass, from the parsed command line; ``others`` are fields that come from elsewhere.

    Raises SettingsError for a number beyond its limits.
    """
    flags = _flags_of(settings)
    made = settings(**{name: getattr(options, about.dest) for name, _, about in flags} | others)
    for name, _, about in flags:
        value = getattr(made, name)
        wanted = about.objection(value)
        if wanted is not None:
            raise SettingsError(f"{about.names[0]}: wanted {wanted}, got {value}")
    return made
