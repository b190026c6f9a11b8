"""The flags of the policies, as the SGLang gateway spells them."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass

from router_core import SettingsError

__all__ = ["ASSIGNMENT_MODES", "Settings", "add_flags"]

logger = logging.getLogger(__name__)

ASSIGNMENT_MODES = ("random", "min_load", "min_group")

#: The policy that a flag is for.
_FOR = {
    "cache_threshold": "cache_aware",
    "balance_abs_threshold": "cache_aware",
    "balance_rel_threshold": "cache_aware",
    "max_tree_size": "cache_aware",
    "assignment_mode": "manual",
    "max_idle_secs": "manual",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """``max_tree_size`` in bytes of prompts for each worker."""

    policy: str = "least_inflight"
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_tree_size: int = 1 << 26
    assignment_mode: str = "random"
    max_idle_secs: float = 14400.0

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError; a flag for another policy is only warned of."""
        given = {name: value for name in _FOR if (value := getattr(options, name)) is not None}
        for name in given:
            if _FOR[name] != options.policy:
                flag = f"--{name.replace('_', '-')}"
                logger.warning("%s has no effect: it is for --policy %s", flag, _FOR[name])
        settings = cls(policy=options.policy, **given)
        if not 0 <= settings.cache_threshold <= 1:
            raise SettingsError(f"--cache-threshold: wanted 0 to 1, got {settings.cache_threshold}")
        if settings.balance_abs_threshold < 0:
            raise SettingsError(
                f"--balance-abs-threshold: wanted 0 or more, got {settings.balance_abs_threshold}"
            )
        if not settings.balance_rel_threshold >= 1:
            raise SettingsError(
                f"--balance-rel-threshold: wanted 1 or more, got {settings.balance_rel_threshold}"
            )
        if settings.max_tree_size < 1:
            raise SettingsError(f"--max-tree-size: wanted 1 or more, got {settings.max_tree_size}")
        if not settings.max_idle_secs > 0:
            raise SettingsError(f"--max-idle-secs: wanted a number above 0, got {settings.max_idle_secs}")
        return settings


def add_flags(parser: argparse.ArgumentParser, policies: list[str]) -> None:
    """Add the flags; the defaults are in :class:`Settings`, so that it shows which were given."""
    default = Settings()
    parser.add_argument(
        "--policy",
        choices=policies,
        default=default.policy,
        help="who gets a request whose session has no worker yet (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-threshold",
        type=float,
        metavar="RATIO",
        help=f"cache_aware: the known part that is worth going where it is known (default: {default.cache_threshold})",
    )
    parser.add_argument(
        "--balance-abs-threshold",
        type=int,
        metavar="N",
        help=f"cache_aware: a difference in load that is too large, if ... (default: {default.balance_abs_threshold})",
    )
    parser.add_argument(
        "--balance-rel-threshold",
        type=float,
        metavar="FACTOR",
        help=f"cache_aware: ... it is also such a factor (default: {default.balance_rel_threshold})",
    )
    parser.add_argument(
        "--max-tree-size",
        type=int,
        metavar="BYTES",
        help=f"cache_aware: prompts that are remembered for each worker (default: {default.max_tree_size})",
    )
    parser.add_argument(
        "--assignment-mode",
        choices=ASSIGNMENT_MODES,
        help=f"manual: where a session begins (default: {default.assignment_mode})",
    )
    parser.add_argument(
        "--max-idle-secs",
        type=float,
        metavar="S",
        help=f"manual, min_group: how long a session counts for its worker (default: {default.max_idle_secs:g})",
    )
