"""The flags of the policies, as the SGLang gateway spells them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from router_core import SettingsError, Worker

__all__ = ["ASSIGNMENT_MODES", "Settings", "add_flags", "unbalanced"]

logger = logging.getLogger(__name__)

ASSIGNMENT_MODES = ("random", "min_load", "min_group")

#: The policies that a flag is for.
_FOR = {
    "cache_threshold": ("cache_aware",),
    "balance_abs_threshold": ("cache_aware", "bucket"),
    "balance_rel_threshold": ("cache_aware", "bucket"),
    "max_tree_size": ("cache_aware",),
    "assignment_mode": ("manual",),
    "max_idle_secs": ("manual",),
    "bucket_adjust_interval_secs": ("bucket",),
    "prefix_token_count": ("prefix_hash",),
    "prefix_hash_load_factor": ("prefix_hash",),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """``max_tree_size`` in bytes of prompts for each worker. ``pairs``: of prefill and decode workers, the policies for
    which are None when they are ``policy``.
    """

    policy: str = "least_inflight"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    pairs: bool = False
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_tree_size: int = 1 << 26
    assignment_mode: str = "random"
    max_idle_secs: float = 14400.0
    bucket_adjust_interval_secs: float = 5.0
    prefix_token_count: int = 256
    prefix_hash_load_factor: float = 1.25

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError; a flag for another policy is only warned of."""
        given = {name: value for name in _FOR if (value := getattr(options, name)) is not None}
        pairs = bool(vars(options).get("pd_disaggregation"))  # a flag of another plugin, as the next one
        names = [options.policy, options.prefill_policy, options.decode_policy]
        if vars(options).get("mini_lb"):
            names = ["random"] * 3
        for name in given:
            if not {*_FOR[name]} & {*(names if pairs else names[:1])}:
                flag, policies = f"--{name.replace('_', '-')}", " or ".join(_FOR[name])
                logger.warning("%s has no effect: it is for --policy %s", flag, policies)
        for flag, value in (("--prefill-policy", names[1]), ("--decode-policy", names[2])):
            if value is not None and not pairs:
                logger.warning("%s has no effect: it is for --pd-disaggregation", flag)
        policy, prefill, decode = names
        settings = cls(policy, prefill, decode, pairs, **given)
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
        if not settings.bucket_adjust_interval_secs > 0:
            seconds = settings.bucket_adjust_interval_secs
            raise SettingsError(f"--bucket-adjust-interval-secs: wanted a number above 0, got {seconds}")
        if not settings.max_idle_secs > 0:
            raise SettingsError(f"--max-idle-secs: wanted a number above 0, got {settings.max_idle_secs}")
        if settings.prefix_token_count < 1:
            raise SettingsError(f"--prefix-token-count: wanted 1 or more, got {settings.prefix_token_count}")
        if not settings.prefix_hash_load_factor >= 1:
            factor = settings.prefix_hash_load_factor
            raise SettingsError(f"--prefix-hash-load-factor: wanted 1 or more, got {factor}")
        return settings


def unbalanced(workers: Sequence[Worker], settings: Settings) -> bool:
    """True when the loads of ``workers`` differ by more than both thresholds."""
    loads = [worker.in_flight for worker in workers]
    most, fewest = max(loads), min(loads)
    return most - fewest > settings.balance_abs_threshold and most > fewest * settings.balance_rel_threshold


def add_flags(parser: argparse.ArgumentParser, policies: list[str], for_prefill: list[str]) -> None:
    """Add the flags; the defaults are in :class:`Settings`, so that it shows which were given."""
    default = Settings()
    parser.add_argument(
        "--policy",
        choices=policies,
        default=default.policy,
        help="who gets a request whose session has no worker yet (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-policy", choices=[*policies, *for_prefill], help="of prefill workers (default: --policy)"
    )
    parser.add_argument("--decode-policy", choices=policies, help="of decode workers (default: --policy)")
    parser.add_argument(
        "--bucket-adjust-interval-secs",
        type=float,
        metavar="S",
        help=f"bucket: time between two divisions (default: {default.bucket_adjust_interval_secs:g})",
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
    parser.add_argument(
        "--prefix-token-count",
        type=int,
        metavar="N",
        help=f"prefix_hash: tokens of a prompt that decide (default: {default.prefix_token_count})",
    )
    parser.add_argument(
        "--prefix-hash-load-factor",
        type=float,
        metavar="FACTOR",
        help=f"prefix_hash: largest load, in means of all loads (default: {default.prefix_hash_load_factor})",
    )
