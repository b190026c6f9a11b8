"""Flags of the engine, declared as fields of its settings."""

from __future__ import annotations

from dataclasses import field
from typing import Any

__all__ = ["flag"]

_METAVARS: dict[type, str] = {int: "N", float: "X", str: "NAME"}


def flag(
    help: str,
    default: Any = None,
    metavar: str = "",
    *,
    kind: type | None = None,
    at_least: int | None = None,
) -> Any:
    """Make a dataclass field whose metadata has the flag's arguments for argparse, and the least value of a number.

    ``kind``: the flag's type. Without it, the type is that of ``default``, or str if ``default`` is None. If the
    default is a whole number other than 0, the help ends with the default.

    :func:`router_core.flags.flag` does not fit here, for three reasons. The plugin's flags have a prefix, and the
    command's flags have none. argparse gets no defaults. ``at_least`` is also checked for settings that are made in
    code.
    """
    kind = kind or (str if default is None else type(default))
    shown = f" (default {default})" if kind is int and default else ""
    more = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": metavar or _METAVARS[kind]}
    return field(default=default, metadata={"flag": {"help": help + shown, **more}, "at_least": at_least})
