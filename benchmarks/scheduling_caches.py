"""``cache_aware`` with small KV caches, in the simulation of ``benchmarks.scheduling``.

*uncorrected* learns nothing from answers. *cache_aware* learns the ``cached_tokens`` of each answer. *KV events* also
gets the engines' KV events, which need prompts of ids. *cache_aware, ids* has such prompts without KV events.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.options import parse
from benchmarks.report import Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.outcomes import Makers, add_outcome, show_outcomes
from benchmarks.simulated.workloads import PAUSED, TINY, WORKLOADS
from router_core import Exchange, Worker
from slime_policies import CacheAware, LeastInflight, Settings

_CACHES = (8_000, 20_000, 40_000, 60_000)


class _Uncorrected:
    """``cache_aware``, but the policy is told nothing of the answers."""

    def __init__(self, policy: CacheAware) -> None:
        self._policy = policy

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self._policy(exchange, workers)


_POLICIES: Makers = {
    "least_inflight": lambda clock: LeastInflight(),
    "uncorrected": lambda clock: _Uncorrected(CacheAware(Settings(), clock)),
    "cache_aware": lambda clock: CacheAware(Settings(), clock),
    "cache_aware, ids": lambda clock: CacheAware(Settings(), clock),
    "KV events, ids": lambda clock: CacheAware(Settings(kv_events=True), clock),
}


def main() -> int:
    options = parse(__doc__ or "", rounds=3)
    report = Report()
    workloads = (WORKLOADS[0], WORKLOADS[2], *PAUSED)
    for workload in options.pick(workloads, tiny=TINY):
        for cache in options.pick(_CACHES, tiny=(500,)):
            table = f"{workload.name}; caches of {cache:,} tokens"
            if not options.wants(table):
                continue
            for name in _POLICIES:
                for seed in range(options.rounds):
                    add_outcome(
                        report,
                        table,
                        _POLICIES,
                        name,
                        workload,
                        seed,
                        costs=Costs(cache=cache),
                        writes_ids=name.endswith("ids"),
                    )
            show_outcomes(report, table)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
