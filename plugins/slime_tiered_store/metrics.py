"""Sizes and counters of the tiers, for ``GET /store`` and as metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime_tiered_store.cold_records import ColdRecords
from slime_tiered_store.tiers.counts import TierCounts

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["offer_metrics", "tiers_of"]


#: The gauges of each tier: the key in ``GET /store``, the name of the metric after ``slime_store_``, and the help.
_GAUGES = (
    ("blocks", "blocks", "Blocks in use."),
    ("capacity", "capacity_blocks", "Blocks that fit."),
    ("bytes", "bytes", "Bytes of the blocks in use."),
    ("pending_bytes", "pending_bytes", "Bytes of writes under way."),
    ("is_failing", "failing", "1 while calls of the disk or the remote store fail, else 0."),
)
#: The counters of each tier, in the same form. The names of their metrics end with ``_total``.
_COUNTERS = (
    ("hits", "hits", "Blocks that reads found in the tier."),
    ("promotions", "promotions", "Blocks that were copied from the tier into the store's memory."),
    ("demotions", "demotions", "Blocks that were copied from memory into the tier."),
    ("evicted_blocks", "evicted_blocks", "Blocks that were evicted."),
    ("written_blocks", "written_blocks", "Blocks that were written."),
    ("written_bytes", "written_bytes", "Bytes that were written."),
    ("read_blocks", "read_blocks", "Blocks that were read."),
    ("read_bytes", "read_bytes", "Bytes that were read."),
    ("missing", "missing", "Blocks that reads did not find."),
    ("corrupt", "corrupt", "Blocks that were read and found corrupt."),
    ("errors", "errors", "Failed calls of the disk or the remote store."),
    ("waits", "waits", "Writes that waited for others."),
    ("waited_s", "waited_seconds", "Seconds that writes waited for others."),
    ("refused", "refused", "Writes that gave up waiting."),
)


def tiers_of(records: ColdRecords) -> dict[str, dict[str, Any]]:
    """Return the sizes and counters of each tier, by tier name, memory first. Empty before the store opens."""
    found: dict[str, dict[str, Any]] = {}
    for engine, tier in records.tiers:
        pool = engine.mempool
        # The memory tier counts nothing: it has no calls that fail or wait.
        counts: TierCounts = getattr(tier, "counts", None) or TierCounts()
        found[engine.name] = {
            "blocks": pool.num_used_blocks,
            "capacity": pool.num_total_blocks,
            "bytes": pool.num_used_blocks * tier.block_bytes,
            "hits": engine.num_hit_blocks,
            "promotions": engine.num_promoted_blocks,
            "demotions": engine.num_demoted_blocks,
            "evicted_blocks": engine.num_evicted_blocks,
            **counts.as_dict(),
        }
    return found


def offer_metrics(metrics: Metrics | None, records: ColdRecords) -> None:
    """Offer the sizes and counters of the records and of the tiers as metrics, if there are metrics."""
    if metrics is None:
        return

    def each(key: str) -> Callable[[], dict[str, float]]:
        return lambda: {tier: float(numbers[key]) for tier, numbers in tiers_of(records).items()}

    for key, name, help in _GAUGES:
        metrics.gauge(f"slime_store_{name}", help, each(key), ["tier"])
    for key, name, help in _COUNTERS:
        metrics.counter(f"slime_store_{name}_total", help, each(key), ["tier"])
    metrics.gauge("slime_store_records", "Records that the store keeps.", lambda: len(records))
    metrics.gauge("slime_store_record_blocks", "Blocks of the kept records.", lambda: records.num_blocks)
    metrics.counter(
        "slime_store_record_waits_total", "Writes that waited for room in the store.", lambda: records.waits
    )
    metrics.counter(
        "slime_store_lost_total",
        "Kept records that are missing or damaged, and damaged parts of notes.",
        lambda: records.losses.count,
    )
