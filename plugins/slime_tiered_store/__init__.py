"""A store for the records of rollouts: in memory, on SSD and in a remote store."""

from __future__ import annotations

import argparse

from router_core import hookimpl
from slime_tiered_store.errors import (
    BlockCorrupt,
    BlockMissing,
    NotEnoughSpaceError,
    NotStored,
    RowsDiffer,
    StoreError,
    TierFailed,
    TierFull,
)
from slime_tiered_store.frames import Layout
from slime_tiered_store.keys import Namespace
from slime_tiered_store.plugin import TieredStorePlugin
from slime_tiered_store.settings import add_store_options, read_settings
from slime_tiered_store.store import PutResult, StoredRows, TieredStore
from slime_tiered_store.tier import Block, BlockKey, MemoryTier, SharedTier, Tier

__all__ = [
    "Block",
    "BlockCorrupt",
    "BlockKey",
    "BlockMissing",
    "Layout",
    "MemoryTier",
    "Namespace",
    "NotEnoughSpaceError",
    "NotStored",
    "PutResult",
    "RowsDiffer",
    "SharedTier",
    "StoreError",
    "StoredRows",
    "Tier",
    "TierFailed",
    "TierFull",
    "TieredStore",
    "TieredStorePlugin",
    "add_options",
    "make_plugin",
    "provides",
    "requires",
]

#: The component that :meth:`TieredStorePlugin.setup` registers.
provides = ("cold_store",)
#: The component that uses the store, and the flag that loads the plugin of that component.
requires = {"trajectories": "--plugin radix_cache"}


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to ``parser``."""
    add_store_options(parser)


def make_plugin(options: argparse.Namespace) -> TieredStorePlugin:
    """Return the plugin for one router. Raises SettingsError."""
    return TieredStorePlugin(*read_settings(options))
