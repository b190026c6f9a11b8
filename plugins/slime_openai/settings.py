"""The plugin's flags, validated once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from router_core.errors import SettingsError
from slime_openai.prompts import HistoryMode
from slime_openai.unknown_parameters import UnknownMode

__all__ = ["Settings", "add_openai_options"]

_HISTORY_BYTES = 1 << 30


def add_openai_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    flags = parser.add_argument_group("openai")
    flags.add_argument(
        "--chat-template",
        default="",
        metavar="FILE",
        help="a Jinja chat template to use instead of the tokenizer's own",
    )
    flags.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="the form in which the model calls tools; auto: by its chat template, none: calls are text",
    )
    flags.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how the model's thoughts are marked; auto: by its chat template, none: they are text",
    )
    flags.add_argument(
        "--history",
        choices=get_args(HistoryMode),
        default="exact",
        help="exact: what the model said stays as it was; template: begin a new branch where the chat template "
        "writes old turns in another way (default exact)",
    )
    flags.add_argument(
        "--history-max-bytes",
        type=int,
        default=_HISTORY_BYTES,
        metavar="BYTES",
        help=f"memory for conversations to go on from, 0 for no limit (default {_HISTORY_BYTES:,})",
    )
    flags.add_argument(
        "--unknown-parameters",
        choices=get_args(UnknownMode),
        default="warn",
        help="parameters that no API here has; warn: they have no effect, and a header of the answer names them; "
        "refuse: the request is a 400; pass: they go to the engine as they are (default warn)",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """See the flags' help. ``chat_template`` is the template itself, None for the tokenizer's. Raises SettingsError."""

    chat_template: str | None
    tool_call_parser: str
    reasoning_parser: str
    history: HistoryMode
    history_max_bytes: int
    unknown_parameters: UnknownMode

    def __post_init__(self) -> None:
        if self.history_max_bytes < 0:
            raise SettingsError(f"--history-max-bytes is {self.history_max_bytes}; wanted 0 or more")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """From the parsed command line."""
        return cls(
            chat_template=_read(options.chat_template) if options.chat_template else None,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            history=options.history,
            history_max_bytes=options.history_max_bytes,
            unknown_parameters=options.unknown_parameters,
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--chat-template {path}: {error}") from None
