"""The plugin's own flags; ``tiers.settings`` has the flags of the tiers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from router_core.flags import add_flags, flag, read_flags
from slime_tiered_store.index.policies import POLICIES
from slime_tiered_store.tiers.settings import TierSettings

__all__ = ["MARK", "STOP", "Settings", "add_store_options", "read_settings"]

STOP, MARK = "stop", "mark"


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the flags; each flag has a help text."""

    on_loss: str = flag(
        "--store-on-loss", default=STOP, choices=(STOP, MARK),
        help="when a kept record is lost: stop the router, or mark its session as not complete and go on",
    )  # fmt: skip
    keep_s: float = flag(
        "--store-keep-secs", default=60.0, above=0, metavar="SECONDS",
        help="longest time that a record waits for the store; failed attempts are repeated",
    )  # fmt: skip
    eviction: str = flag(
        "--store-eviction", default="lru", choices=tuple(POLICIES),
        help="which blocks are evicted first, from memory and from an SSD in front of a remote store",
    )  # fmt: skip


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the plugin and of its tiers to ``parser``."""
    group = parser.add_argument_group("tiered_store")
    add_flags(group, TierSettings)
    add_flags(group, Settings)


def read_settings(options: argparse.Namespace) -> tuple[Settings, TierSettings]:
    """Check the parsed command line. Raises SettingsError."""
    return read_flags(Settings, options), read_flags(TierSettings, options)
