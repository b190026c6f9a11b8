"""The metrics of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.tally import Tally
from slime_sglang.generation import GENERATION_PATHS

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics

__all__ = ["offer_metrics"]


def offer_metrics(metrics: Metrics | None, tally: Tally, kept: Trajectories) -> None:
    """Register the counts of ``tally`` and the sizes of ``kept`` as metrics. If ``metrics`` is None, do nothing."""
    if metrics is None:
        return
    metrics.counter(
        "smg_router_tokens_total", "Prompt tokens and sampled tokens of the generations that the cache records.",
        lambda: {"input": tally.tokens_prompted, "output": tally.tokens_sampled}, ["token_type"],
    )  # fmt: skip
    metrics.counter(
        "slime_prompt_tokens_total", "Prompt tokens: known from an earlier request, tokenised by the router, or given.",
        lambda: {
            "reused": tally.tokens_reused, "encoded": tally.tokens_encoded, "given": tally.tokens_given
        }, ["source"],
    )  # fmt: skip
    metrics.counter(
        "slime_cache_prompts_total", "Prompts with some known tokens (hit), and without (miss).",
        lambda: {"hit": tally.hits, "miss": tally.prompts - tally.hits}, ["result"],
    )  # fmt: skip
    metrics.gauge(
        "slime_cache_hit_rate", "Share of prompts with known tokens, since the start.",
        lambda: tally.hits / tally.prompts if tally.prompts else None,
    )  # fmt: skip
    metrics.counter(
        "slime_generations_total",
        "Sequences that engines sampled for clients, by path, and by the reason why their tokens are not exact.",
        lambda: _by_path(tally.generated), ["path", "reason"],
    )  # fmt: skip
    metrics.counter(
        "slime_retrieved_answers_total", "Answers to /retrieve_from_... by the reason why they are not exact.",
        lambda: _by_kind(tally.answers), ["reason"],
    )  # fmt: skip
    metrics.counter(
        "slime_untouched_generations_total",
        "Generations that went to the engine unchanged and were not recorded, by reason or path.",
        lambda: _by_kind(tally.untouched_by_reason), ["reason"],
    )  # fmt: skip
    metrics.counter(
        "slime_unrecorded_answers_total", "Failures to record a prompt or an answer.",
        lambda: _by_kind(tally.unrecorded_by_kind), ["kind"],
    )  # fmt: skip
    metrics.counter(
        "slime_engine_contradictions_total", "Answers in which an engine contradicts itself, by field.",
        lambda: _by_kind(tally.contradictions), ["field"],
    )  # fmt: skip
    metrics.counter(
        "slime_engine_aborts_total", "Generations that an engine aborted, by outcome.",
        lambda: tally.aborts, ["outcome"],
    )  # fmt: skip
    metrics.gauge("slime_cache_segments", "Recorded segments.", lambda: kept.segments)
    metrics.gauge("slime_cache_tokens", "Recorded tokens.", lambda: kept.tokens)
    metrics.gauge("slime_cache_bytes", "Memory of the recorded segments.", lambda: kept.size_bytes)
    metrics.counter(
        "slime_cache_evictions_total", "Segments evicted, by reason.", lambda: kept.evicted, ["reason"]
    )


def _by_path(counts: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    """Return ``counts`` with few paths: an unknown path, which a client may choose, becomes "other"."""
    found: Counter[tuple[str, str]] = Counter()
    for (path, reason), count in counts.items():
        known = path if path.encode() in GENERATION_PATHS else "other"
        found[known, reason] += count
    return found


def _by_kind(counts: Mapping[str, int]) -> Counter[str]:
    """Return ``counts`` by the part of each reason before its colon. A client may have chosen the part after it."""
    found: Counter[str] = Counter()
    for reason, count in counts.items():
        found[reason.partition(":")[0]] += count
    return found
