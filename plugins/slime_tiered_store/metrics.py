"""Sizes and counters of the tiers, for ``GET /store`` and as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_tiered_store.cold_records import ColdRecords
from slime_tiered_store.tiers.counts import TierCounts

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["offer_metrics", "tiers_of"]


def tiers_of(records: ColdRecords) -> dict[str, dict[str, Any]]:
    """Return the sizes and counters of each tier, by tier name, memory first. Empty before the store opens."""
    found: dict[str, dict[str, Any]] = {}
    for engine, tier in records.tiers:
        pool = engine.mempool
        counts: TierCounts | None = getattr(tier, "counts", None)  # the memory tier has no counters
        found[engine.name] = {
            "blocks": pool.num_used_blocks,
            "capacity": pool.num_total_blocks,
            "bytes": pool.num_used_blocks * tier.block_bytes,
            "hits": engine.num_hit_blocks,
            "promotions": engine.num_promoted_blocks,
            "demotions": engine.num_demoted_blocks,
            "evicted_blocks": engine.num_evicted_blocks,
            **(counts.as_dict() if counts is not None else {}),
        }
    return found


def offer_metrics(metrics: Metrics | None, records: ColdRecords) -> None:
    """Offer the sizes and counters of the tiers as metrics, if there are metrics."""
    if metrics is None:
        return

    def each(name: str) -> Any:
        return lambda: {tier: numbers[name] for tier, numbers in tiers_of(records).items() if name in numbers}

    metrics.gauge("slime_store_records", "Records that the store keeps.", lambda: len(records))
    metrics.gauge("slime_store_blocks", "Blocks in use.", each("blocks"), ["tier"])
    metrics.gauge("slime_store_bytes", "Bytes of the blocks in use.", each("bytes"), ["tier"])
    for name, help in (
        ("hits", "Blocks that reads found in the tier."),
        ("promotions", "Blocks that were copied from the tier into the store's memory."),
        ("demotions", "Blocks that were copied from memory into the tier."),
        ("evicted_blocks", "Blocks that were evicted."),
        ("written_bytes", "Bytes that were written."),
        ("read_bytes", "Bytes that were read."),
        ("corrupt", "Blocks that were read and found corrupt."),
        ("errors", "Failed calls of the disk or the remote store."),
        ("waits", "Writes that waited for others."),
        ("refused", "Writes that gave up waiting."),
    ):
        metrics.counter(f"slime_store_{name}_total", help, each(name), ["tier"])
    metrics.counter(
        "slime_store_record_waits_total", "Writes that waited for room in the store.", lambda: records.waits
    )
    metrics.counter(
        "slime_store_lost_total",
        "Kept records that no tier had when they were read.",
        lambda: records.losses.count,
    )
