"""Reasons why the rows of a context are not known."""

from __future__ import annotations

__all__ = [
    "DROPPED",
    "MIS_SIZED",
    "NOT_CONSUMED",
    "NOT_IN_STORE",
    "NOT_KEPT",
    "NOT_RECORDED",
    "NOT_TOLD",
    "OTHER_ADAPTER",
    "OTHER_VERSION",
    "SHAPE_UNKNOWN",
    "SIZES_DISAGREE",
    "STARTS_LATER",
]

#: This run knows nothing about the rows: an earlier run, another router, or a run without the plugin recorded the turn.
NOT_RECORDED = "not_recorded"
#: The answer had no rows: they were not asked for, the engine does not return them, or the generation broke off.
NOT_TOLD = "not_told"
#: The rows in the answer are not base64 of int32, or their size does not fit the tokens or the shape of a row.
MIS_SIZED = "mis_sized"
#: The client asked for later rows only (``routed_experts_start_len``).
STARTS_LATER = "starts_later"
#: All rows that engines sent for these tokens may have been computed with other weights than those that sampled the
#: tokens.
OTHER_VERSION = "other_weight_version"
#: Turns of the context were sampled with several LoRA adapters, and each adapter routes differently.
OTHER_ADAPTER = "other_adapter"
#: The rows were dropped, since memory had too many rows (``--r3-max-bytes``).
DROPPED = "dropped"
#: The store could not take the rows in time (``--store-keep-secs``), and memory had no room for them.
NOT_KEPT = "not_kept"
#: The store has lost the rows, or they were deleted while they were read.
NOT_IN_STORE = "not_in_store"
#: No engine has yet answered a request whose prompt has the last tokens.
NOT_CONSUMED = "not_consumed"
#: No flag and no worker says the shape of a row, and no two answers confirm its size.
SHAPE_UNKNOWN = "shape_unknown"
#: Engines returned rows of different sizes, and no flag and no worker says which size is right.
SIZES_DISAGREE = "sizes_disagree"
