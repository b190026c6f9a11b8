"""A parser for commands that have their own flags."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from slime_start.parsing import plainly
from slime_start.suggestions import unknown_name

__all__ = ["CommandParser"]

_UNKNOWN = "unrecognized arguments: "
_OF_THE_ROUTER = ("--plugin", "--middleware-paths", "--worker-urls", "--no-default-plugins", "--config")


class CommandParser(argparse.ArgumentParser):
    """Raises ``failure`` for a mistake, instead of writing the usage. ``options`` are argparse's."""

    def __init__(self, *, failure: type[Exception], **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._failure = failure

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            name = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            if "://" in name and "--url" in self._option_string_actions:
                raise self._failure(f"an address belongs after a flag: --url {name}")
            if name in _OF_THE_ROUTER:
                raise self._failure(
                    f"{name} is a flag of the router, which starts without a command: slime-router {name} ..."
                )
            told = unknown_name("flag", name, self._option_string_actions, {})
            raise self._failure(
                f"{told or f'unknown flag or value {name}'} ({self.prog} --help shows all flags)"
            )
        raise self._failure(plainly(message, self._option_string_actions))
