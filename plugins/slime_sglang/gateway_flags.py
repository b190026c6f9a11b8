"""Flags that only the SGLang gateway (sglang-router 0.3.2) has: the gateway's launch lines work here all the same.

A flag that the core or a loaded plugin defines is not handled here. Other flags that do not matter to requests are
accepted, and a line in the log says why each flag has no effect. With a flag that matters to requests, the router does
not start, unless the flag's value changes nothing. Values are never shown, since some are secrets.
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

    ``nargs``: as in argparse, or 0 for a switch. ``unless``: the values with which a ``refused`` flag is accepted.
    """

    name: str
    why: str
    nargs: int | str | None = None
    refused: bool = False
    unless: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """Name of the parsed option. Its prefix keeps plugins from reading it by accident."""
        return f"gateway{self.name.replace('-', '_')}"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag to ``parser``, hidden from the help. If it is not given, no option is set."""
        how: dict[str, Any] = {"action": "store_true"} if self.nargs == 0 else {"nargs": self.nargs}
        parser.add_argument(
            self.name, dest=self.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
        )


_Row = tuple[str, int | str | None, str]

#: Names of flags that make no difference to requests, the flags' nargs, and the reason.
_IDLE: tuple[_Row, ...] = (
    ("--eviction-interval-secs", None, "the memory of --policy cache_aware is trimmed with each request"),
    ("--model-path --tokenizer-path", None, "plugins take their tokenizer from --hf-checkpoint"),
    ("--chat-template --reasoning-parser --tool-call-parser", None, "it is for --plugin openai"),
    (
        "--tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1",
        0,
        "--plugin radix_cache caches tokenised text anyway",
    ),
    (
        "--tokenizer-cache-l0-max-entries --tokenizer-cache-l1-max-memory",
        None,
        "--plugin radix_cache caches tokenised text anyway",
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

#: Flags that would change the handling of requests.
_REFUSED: tuple[_Row, ...] = (
    ("--backend", None, "workers are SGLang servers"),
    ("--history-backend", None, "no history is kept"),
)

_UNLESS = {"--backend": ("sglang",), "--history-backend": ("memory", "none")}

FLAGS = tuple(
    GatewayFlag(name, why, nargs, refused=rows is _REFUSED, unless=_UNLESS.get(name, ()))
    for rows in (_IDLE, _REFUSED)
    for names, nargs, why in rows
    for name in names.split()
)


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Add the rest of the gateway's flags to ``parser``, which has the flags of the core and of the loaded plugins."""
    for flag in FLAGS:
        if flag.name not in parser._option_string_actions:
            flag.add_to(parser)


def without_effect(options: argparse.Namespace) -> list[str]:
    """Return a line for each given flag without effect. Raises SettingsError for a refused flag."""
    given = vars(options)
    lines = []
    for flag in FLAGS:
        if flag.dest in given:
            if flag.refused and given[flag.dest] not in flag.unless:
                raise SettingsError(f"{flag.name} is not supported: {flag.why}")
            lines.append(f"{flag.name} has no effect: {flag.why}")
    return lines
