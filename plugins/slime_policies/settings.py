"""The flags of the policies. Flags that the SGLang gateway has, too, are spelt as there."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from router_core import SettingsError
from router_core.flags import add_flags, flag, read_flags

__all__ = ["AFFINITIES", "ASSIGNMENT_MODES", "LOADS", "Settings", "add_policy_options", "unbalanced"]

logger = logging.getLogger(__name__)

ASSIGNMENT_MODES = ("random", "min_load", "min_group")
AFFINITIES = ("soft", "strict")
LOADS = ("requests", "tokens", "engine")
#: The policies that ``auto`` stands for in pairs: only prefill workers gain from cached prefixes.
_AUTO_IN_PAIRS = {"prefill": "cache_aware", "decode": "least_inflight"}
_POLICY_FLAGS = ("--policy", "--prefill-policy", "--decode-policy")

#: Defaults of the SGLang gateway for the two thresholds of unbalanced loads: requests, and a factor.
_ABS, _REL = 64, 1.5

#: The policies that each flag is for.
_FOR = {
    "cache_threshold": ("auto", "cache_aware"),
    "balance_abs_threshold": ("auto", "cache_aware", "bucket"),
    "balance_rel_threshold": ("auto", "cache_aware", "bucket"),
    "max_tree_size": ("auto", "cache_aware"),
    "session_affinity": ("auto",),
    "assignment_mode": ("manual",),
    "max_idle_secs": ("manual",),
    "bucket_adjust_interval_secs": ("bucket",),
    "prefix_token_count": ("prefix_hash",),
    "prefix_hash_load_factor": ("prefix_hash",),
    "kv_events": ("auto", "cache_aware"),
    "kv_events_max_blocks": ("auto", "cache_aware"),
    "load": ("least_inflight", "power_of_two"),
    "load_poll_interval_secs": ("least_inflight", "power_of_two"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the command line. ``pairs``: prefill and decode workers have policies of their own.

    ``prefill_policy`` and ``decode_policy``: None stands for ``policy``.
    """

    policy: str = "auto"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    pairs: bool = False
    bucket_adjust_interval_secs: float = flag(
        "--bucket-adjust-interval-secs", default=5.0, above=0, finite=False, metavar="S",
        help="bucket: time between two adjustments of the length ranges (default: %(default)g)",
    )  # fmt: skip
    cache_threshold: float | None = flag(
        "--cache-threshold", at_least=0, at_most=1, type=float, metavar="RATIO",
        help="cache_aware: share of the prompt, 0 to 1; a worker that has no more than this share in its cache"
        " counts as having none of it (default: any part counts)",
    )  # fmt: skip
    balance_abs_threshold: int | None = flag(
        "--balance-abs-threshold", at_least=0, type=int, metavar="N",
        help="cache_aware, bucket: loads are unbalanced when they differ by more than N requests (bucket: bytes"
        " in the last interval) and by more than --balance-rel-threshold; then the prompt does not matter"
        " (default: 64; cache_aware uses it only if at least one of the two flags is given)",
    )  # fmt: skip
    balance_rel_threshold: float | None = flag(
        "--balance-rel-threshold", at_least=1, type=float, metavar="FACTOR",
        help="cache_aware, bucket: factor by which unbalanced loads must differ, too; see --balance-abs-threshold"
        " (default: 1.5; cache_aware uses it only if at least one of the two flags is given)",
    )  # fmt: skip
    max_tree_size: int = flag(
        "--max-tree-size", default=1 << 26, at_least=1, metavar="BYTES",
        help="cache_aware: most bytes of remembered prefixes; a prefix counts once, however many workers have it",
    )  # fmt: skip
    kv_events: bool = flag(
        "--kv-events", default=False,
        help="cache_aware: follow the KV events of the engines that publish them, for prompts given as ids",
    )  # fmt: skip
    kv_events_max_blocks: int = flag(
        "--kv-events-max-blocks", default=2_000_000, at_least=1, metavar="N",
        help="--kv-events: most blocks that a policy remembers; the blocks of all its workers count",
    )  # fmt: skip
    assignment_mode: str = flag(
        "--assignment-mode", choices=ASSIGNMENT_MODES, default="random",
        help="manual: how the worker of a new session is chosen",
    )  # fmt: skip
    max_idle_secs: float = flag(
        "--max-idle-secs", default=14400.0, above=0, finite=False, metavar="S",
        help="manual with min_group: how long a new session counts for its worker (default: %(default)g)",
    )  # fmt: skip
    prefix_token_count: int = flag(
        "--prefix-token-count", default=256, at_least=1, metavar="N",
        help="prefix_hash: tokens at the beginning of the prompt that are hashed",
    )  # fmt: skip
    prefix_hash_load_factor: float = flag(
        "--prefix-hash-load-factor", default=1.25, at_least=1, metavar="FACTOR",
        help="prefix_hash: largest load of the chosen worker, as a multiple of the mean load",
    )  # fmt: skip

    session_affinity: str = flag(
        "--session-affinity", choices=AFFINITIES, default="soft",
        help="auto: a session leaves its worker only when the worker cannot be used (strict), or also when the"
        " worker is overloaded (soft)",
    )  # fmt: skip
    load: str = flag(
        "--load", choices=LOADS, default="requests",
        help="least_inflight, power_of_two: the load of a worker: its requests in flight, their tokens,"
        " or the tokens that the engine reports",
    )  # fmt: skip
    load_poll_interval_secs: float = flag(
        "--load-poll-interval-secs", default=1.0, above=0, metavar="S",
        help="--load engine: time between two polls of an engine's load (default: %(default)g)",
    )  # fmt: skip

    @property
    def has_balance_thresholds(self) -> bool:
        """True when at least one of the two thresholds of unbalanced loads is given."""
        return self.balance_abs_threshold is not None or self.balance_rel_threshold is not None

    def policy_in_pairs(self, kind: Literal["prefill", "decode"]) -> str:
        """Return the name of the policy for the workers of type ``kind`` in pairs."""
        name = (self.prefill_policy if kind == "prefill" else self.decode_policy) or self.policy
        return _AUTO_IN_PAIRS[kind] if name == "auto" else name

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Settings:
        """Check the parsed command line. Raises SettingsError; logs a warning for a flag without effect."""
        pairs = bool(vars(options).get("pd_disaggregation"))  # a flag of another plugin, as is mini_lb
        default = cls()
        names = [options.policy, options.prefill_policy, options.decode_policy]
        if vars(options).get("mini_lb"):
            for unused, value in zip(_POLICY_FLAGS, names, strict=True):
                if value not in (None, default.policy, "random"):
                    logger.warning("%s has no effect: with --mini-lb, all policies are random", unused)
            names = ["random", None, None]
        policy, prefill, decode = names
        settings = read_flags(
            cls, options, policy=policy, prefill_policy=prefill, decode_policy=decode, pairs=pairs
        )
        used = {settings.policy}
        if pairs:
            used = {settings.policy_in_pairs("prefill"), settings.policy_in_pairs("decode")}
        for name, policies in _FOR.items():
            is_given = getattr(settings, name) != getattr(default, name)
            if is_given and used.isdisjoint(policies):
                why = f"it is for policy {' or '.join(policies)}"
                if pairs and policies == ("auto",):
                    why = f"with --pd-disaggregation, auto stands for {' and '.join(_AUTO_IN_PAIRS.values())}"
                logger.warning("--%s has no effect: %s", name.replace("_", "-"), why)
        if settings.kv_events and find_spec("zmq") is None:
            raise SettingsError("--kv-events needs pyzmq: pip install 'slime-router[kv-events]'")
        if not settings.kv_events and settings.kv_events_max_blocks != default.kv_events_max_blocks:
            logger.warning("--kv-events-max-blocks has no effect: it is for --kv-events")
        if settings.load != "engine" and settings.load_poll_interval_secs != default.load_poll_interval_secs:
            logger.warning("--load-poll-interval-secs has no effect: it is for --load engine")
        for unused, value in zip(_POLICY_FLAGS[1:], names[1:], strict=True):
            if value is not None and not pairs:
                logger.warning("%s has no effect: it is for --pd-disaggregation", unused)
        return settings


def unbalanced(loads: Sequence[int], settings: Settings) -> bool:
    """Return True when the ``loads`` of workers differ by more than both thresholds, which default to the gateway's."""
    most, fewest = max(loads), min(loads)
    by, times = settings.balance_abs_threshold, settings.balance_rel_threshold
    return most - fewest > (_ABS if by is None else by) and most > fewest * (_REL if times is None else times)


def add_policy_options(parser: argparse.ArgumentParser, policies: list[str], for_prefill: list[str]) -> None:
    """Add the flags to ``parser``."""
    # not declared with ``flag``, since the choices depend on the policies that are installed
    parser.add_argument(
        "--policy", choices=policies, default=Settings().policy,
        help="how a worker is chosen; a session keeps its worker, but with auto it moves when that worker is"
        " overloaded, and with consistent_hashing a hash ring decides for each request"
        " (default: %(default)s)",
    )  # fmt: skip
    for kind, choices in (("prefill", [*policies, *for_prefill]), ("decode", policies)):
        told = f"policy of {kind} workers (default: --policy)"
        parser.add_argument(f"--{kind}-policy", choices=choices, help=told)
    add_flags(parser, Settings)
