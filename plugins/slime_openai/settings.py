"""The plugin's flags, validated once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from router_core.errors import SettingsError
from router_core.flags import add_flags, flag, read_flags
from slime_openai.prompts.turn_tokens import HistoryMode
from slime_openai.requests.unknown_parameters import UnknownMode

__all__ = ["Settings", "add_openai_options"]

_HISTORY_BYTES = 1 << 30
#: KnownMessages may use ``--history-max-bytes`` divided by this number.
_KNOWN_SHARE = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the flags. ``chat_template``: the text of the template; None: the tokenizer's own is used."""

    chat_template: str | None = flag(
        "--chat-template", default="", metavar="FILE",
        help="a Jinja chat template to use instead of the tokenizer's own",
    )  # fmt: skip
    tool_call_parser: str = flag(
        "--tool-call-parser", default="auto", metavar="NAME",
        help="the model's format of tool calls; auto (default): from its chat template; none: calls stay text",
    )  # fmt: skip
    reasoning_parser: str = flag(
        "--reasoning-parser", default="auto", metavar="NAME",
        help="the model's format of thoughts; auto (default): from its chat template; none: thoughts stay text",
    )  # fmt: skip
    history: HistoryMode = flag(
        "--history", choices=get_args(HistoryMode), default="exact",
        help="tokens of old turns; exact (default): the sampled tokens; template: begin a new branch where "
        "the chat template writes old turns differently",
    )  # fmt: skip
    history_max_bytes: int = flag(
        "--history-max-bytes", default=_HISTORY_BYTES, at_least=0, metavar="BYTES",
        help=f"memory for conversations that can be continued, 0: no limit (default {_HISTORY_BYTES:,})",
    )  # fmt: skip
    unknown_parameters: UnknownMode = flag(
        "--unknown-parameters", choices=get_args(UnknownMode), default="warn",
        help="handling of unknown parameters; warn (default): they have no effect, and a header of the answer names "
        "them; refuse: the request gets a 400; pass: they go to the engine",
    )  # fmt: skip

    @property
    def known_messages_max_bytes(self) -> int:
        """The part of ``history_max_bytes`` for KnownMessages; without a limit (0), the same part of the default."""
        return (self.history_max_bytes or _HISTORY_BYTES) // _KNOWN_SHARE

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError."""
        path = options.chat_template
        return read_flags(cls, options, chat_template=_read(path) if path else None)


def add_openai_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    add_flags(parser.add_argument_group("openai"), Settings)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--chat-template {path}: {error}") from None
