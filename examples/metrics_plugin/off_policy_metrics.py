"""Counts the generations that were under way when the weights changed: their tokens come from two policies."""

from __future__ import annotations

import argparse
from collections import Counter

from router_core import Exchange, WeightUpdate, hookimpl
from router_core.router import Router

requires = {"metrics": "the default plugins"}  # the plugin `metrics` offers this component


def make_plugin(options: argparse.Namespace) -> OffPolicyMetrics:
    return OffPolicyMetrics()


class OffPolicyMetrics:
    """Keeps plain numbers; the router reads them when somebody asks for /metrics."""

    def __init__(self) -> None:
        self.under_way = 0
        self.across: Counter[str] = Counter()

    @hookimpl
    def setup(self, router: Router) -> None:
        metrics = router.components.get("metrics")
        metrics.gauge("generations_under_way", "Generations that run now.", lambda: self.under_way)
        metrics.counter(
            "generations_across_updates_total",
            "Generations that ran during a weight update, by the source of the update.",
            lambda: self.across,
            ["source"],
        )

    @hookimpl
    def pre_request(self, exchange: Exchange) -> None:
        if exchange.request.path == "/generate":  # the plugin `openai` sends such a request for a chat
            self.under_way += 1
            exchange.on_close(self.ended)

    def ended(self) -> None:
        self.under_way -= 1

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        self.across[update.source] += self.under_way
