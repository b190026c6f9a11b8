"""Moves blocks between tiers."""

from slime_tiered_store.transfers.executor import TransferExecutor
from slime_tiered_store.transfers.graph import OpStatus, TransferOp, TransferOpGraph, TransferType
from slime_tiered_store.transfers.scheduler import TransferScheduler

__all__ = [
    "OpStatus",
    "TransferExecutor",
    "TransferOp",
    "TransferOpGraph",
    "TransferScheduler",
    "TransferType",
]
