"""Numbers of the router, read from the metrics that plugins offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router_core.router import Router

if TYPE_CHECKING:
    from slime_metrics.contracts import Metrics, Traffic

__all__ = ["Cumulative", "Numbers"]


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Totals of generations since the router started. ``refused``: answers with a 4xx.

    ``failed``: answers with a 5xx, and 2xx answers that broke off or failed in mid-stream. ``succeeded``: the other 2xx
    answers. Numbers of tokens and prompts are None without the plugin that counts them. For ``bounds``, ``whole`` and
    ``first_byte`` see ``slime_metrics.contracts.Totals``.
    """

    succeeded: int
    refused: int
    failed: int
    bounds: tuple[float, ...]
    whole: tuple[int, ...]
    first_byte: tuple[int, ...]
    prompt_tokens: float | None = None
    sampled_tokens: float | None = None
    hits: float | None = None
    prompts: float | None = None


class Numbers:
    """Reads values of metrics by name. Without the plugin ``metrics`` there are no values."""

    def __init__(self, router: Router) -> None:
        self._metrics: Metrics | None = router.components.find("metrics")
        self._traffic: Traffic | None = router.components.find("traffic")

    def one(self, name: str) -> float | None:
        """Return the value of the metric ``name``, which has no labels; None: there is no value."""
        found = self._metrics.numbers(name) if self._metrics is not None else None
        return None if isinstance(found, Mapping) else found

    def by_label(self, name: str) -> dict[str, float] | None:
        """Return the sums of the metric ``name`` by the values of its last label; None: there is no such metric."""
        found = self._metrics.numbers(name) if self._metrics is not None else None
        if not isinstance(found, Mapping):
            return None
        sums: dict[str, float] = {}
        for labels, number in found.items():
            value = labels if isinstance(labels, str) else labels[-1]
            sums[value] = sums.get(value, 0) + number
        return sums

    @property
    def has_traffic(self) -> bool:
        """True with the plugin ``metrics``."""
        return self._traffic is not None

    def cumulative(self) -> Cumulative:
        """Return the present totals. Call it only if :attr:`has_traffic` is true."""
        assert self._traffic is not None  # narrowing: the caller has checked has_traffic
        totals = self._traffic.totals()
        tokens = self.by_label("smg_router_tokens_total") or {}
        prompts = self.by_label("slime_cache_prompts_total")
        broken_off = totals.incomplete.get(2, 0)
        return Cumulative(
            totals.by_class.get(2, 0) - broken_off,
            totals.by_class.get(4, 0),
            totals.by_class.get(5, 0) + broken_off,
            tuple(totals.bounds),
            tuple(totals.whole),
            tuple(totals.first_byte),
            tokens.get("input"),
            tokens.get("output"),
            None if prompts is None else prompts.get("hit", 0),
            None if prompts is None else sum(prompts.values()),
        )
