"""Flags of the SGLang gateway without effect here: accepted or refused, so that a launch line carries over.

Those of sglang-router 0.3.2. A flag that the core or a loaded plugin has is theirs. Of the others, a flag that makes
no difference to requests is taken, and a line at the start says why it has no effect. With a flag without which
requests are treated differently, or other clients get in, the router does not start. Their values are never told: some
are secrets.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from router_core.errors import SettingsError

__all__ = ["FLAGS", "GatewayFlag", "add_gateway_flags", "without_effect"]


@dataclass(frozen=True, slots=True)
class GatewayFlag:
    """One flag, and why it has no effect or is refused.

    ``nargs`` as argparse has it, 0 for a switch; a ``refused`` one is taken with a value of ``unless``.
    """

    name: str
    why: str
    nargs: int | str | None = None
    refused: bool = False
    unless: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """Its name among the parsed options: no plugin looks there by accident."""
        return f"gateway{self.name.replace('-', '_')}"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let ``parser`` take it, unseen in the help; when it is not given, it leaves no trace."""
        how: dict[str, Any] = {"action": "store_true"} if self.nargs == 0 else {"nargs": self.nargs}
        parser.add_argument(
            self.name, dest=self.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
        )


_Row = tuple[str, int | str | None, str]

#: Flags that make no difference to requests, their nargs, and the reason.
_IDLE: tuple[_Row, ...] = (
    ("--prometheus-port --prometheus-host", None, "the router serves no metrics"),
    ("--prometheus-duration-buckets", "+", "the router serves no metrics"),
    ("--enable-trace", 0, "the router writes no traces"),
    ("--otlp-traces-endpoint", None, "the router writes no traces"),
    ("--eviction-interval-secs", None, "the memory of --policy cache_aware is trimmed with each request"),
    ("--model-path --tokenizer-path", None, "plugins take their tokenizer from --hf-checkpoint"),
    ("--chat-template --reasoning-parser --tool-call-parser", None, "it is for --plugin openai"),
    (
        "--tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1",
        0,
        "--plugin radix_cache tokenises nothing twice as it is",
    ),
    (
        "--tokenizer-cache-l0-max-entries --tokenizer-cache-l1-max-memory",
        None,
        "--plugin radix_cache tokenises nothing twice as it is",
    ),
    ("--mcp-config-path", None, "the router calls no tools"),
    (
        "--oracle-wallet-path --oracle-tns-alias --oracle-connect-descriptor --oracle-username"
        " --oracle-password --oracle-pool-min --oracle-pool-max --oracle-pool-timeout-secs"
        " --postgres-db-url --postgres-pool-max --redis-url --redis-pool-max --redis-retention-days",
        None,
        "it is for a database, and no history is kept",
    ),
)

#: Without these other things would happen, or others would get in.
_REFUSED: tuple[_Row, ...] = (
    ("--backend", None, "workers are SGLang servers"),
    ("--history-backend", None, "no history is kept"),
)

_UNLESS = {"--backend": ("sglang",), "--history-backend": ("memory", "none")}

#: All of them.
FLAGS = tuple(
    GatewayFlag(name, why, nargs, refused=rows is _REFUSED, unless=_UNLESS.get(name, ()))
    for rows in (_IDLE, _REFUSED)
    for names, nargs, why in rows
    for name in names.split()
)


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Let ``parser``, which has the flags of the core and of all plugins, take the rest of the gateway's."""
    for flag in FLAGS:
        if flag.name not in parser._option_string_actions:
            flag.add_to(parser)


def without_effect(options: argparse.Namespace) -> list[str]:
    """A line for each flag that was given and has no effect. Raises SettingsError for one that is refused."""
    given = vars(options)
    lines = []
    for flag in FLAGS:
        if flag.dest in given:
            if flag.refused and given[flag.dest] not in flag.unless:
                raise SettingsError(f"{flag.name} is not supported: {flag.why}")
            lines.append(f"{flag.name} has no effect: {flag.why}")
    return lines
