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
    """Make a dataclass field with the limit of a number, and with what argparse needs for the flag.

    ``kind`` is the flag's type, if it is not the type of ``default`` or str. The help ends with a default that is a
    whole number, unless it is 0.

    This is not :func:`router_core.flags.flag`: the plugin's flags have a prefix that the command's have not. A flag
    that is not given has no value, and ``at_least`` holds for settings that code makes, too.
    """
    kind = kind or (str if default is None else type(default))
    shown = f" (default {default})" if kind is int and default else ""
    more = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": metavar or _METAVARS[kind]}
    return field(default=default, metadata={"flag": {"help": help + shown, **more}, "at_least": at_least})
