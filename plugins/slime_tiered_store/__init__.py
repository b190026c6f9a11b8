"""Keeps what rollouts produced in memory, on SSD and in a remote store."""

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
]
