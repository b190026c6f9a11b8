"""The engine's flags: ``--model ...`` of ``slime-router engine``, ``--engine-model ...`` of the plugin."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime_engine.script import read_script
from slime_engine.settings import Settings

__all__ = ["add_engine_options", "as_flag", "settings_from"]

_FLAGS = {each.name.replace("_", "-"): each.metadata["flag"] for each in fields(Settings) if each.metadata}


def add_engine_options(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    """Add a flag ``--<prefix><field>`` for each field of Settings that a user may set."""
    for name, options in _FLAGS.items():
        parser.add_argument(f"--{prefix}{name}", **options)


def as_flag(error: ValueError, prefix: str = "") -> str:
    """Return the message of ``error``. If the first word is the name of a setting, the flag replaces that word."""
    name, space, rest = str(error).partition(" ")
    plain = name.removeprefix("--").replace("_", "-")
    return f"--{prefix}{plain}{space}{rest}" if plain.rstrip(":") in _FLAGS else str(error)


def settings_from(options: argparse.Namespace, prefix: str = "", **more: Any) -> Settings:
    """Return settings from the given flags. Raises ValueError when a flag or the script is invalid."""
    given = vars(options)
    values = {field.name: given.get(prefix.replace("-", "_") + field.name) for field in fields(Settings)}
    if values["script"] is not None:
        try:
            values["script"] = read_script(values["script"])
        except ValueError as error:
            raise ValueError(f"script: {error}") from None
    if values["model"] is not None and values["model_name"] is None:
        values["model_name"] = Path(values["model"]).name
    return Settings(**{name: value for name, value in values.items() if value is not None} | more)
