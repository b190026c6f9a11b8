"""``cache_aware`` with small KV caches, in the simulation of ``benchmarks.scheduling``: told of answers, and not."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

from benchmarks.options import parse
from benchmarks.report import Column, Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.simulation import simulate
from benchmarks.simulated.workloads import PAUSED, WORKLOADS
from router_core import Exchange, Worker
from slime_policies import CacheAware, LeastInflight, Policy, Settings

_CACHES = (8_000, 20_000, 40_000, 60_000)


class _Uncorrected:
    """``cache_aware`` that is told of no answer."""

    def __init__(self, policy: CacheAware) -> None:
        self._policy = policy

    def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
        return self._policy(exchange, workers)


_POLICIES: dict[str, Callable[[Callable[[], float]], Policy]] = {
    "least_inflight": lambda clock: LeastInflight(),
    "uncorrected": lambda clock: _Uncorrected(CacheAware(Settings(), clock)),
    "cache_aware": lambda clock: CacheAware(Settings(), clock),
}


def main() -> int:
    options = parse(__doc__ or "", rounds=3)
    report = Report()
    workloads = (WORKLOADS[0], WORKLOADS[2], *PAUSED)
    for workload in options.pick(workloads, tiny=WORKLOADS[-1:]):
        for cache in options.pick(_CACHES, tiny=_CACHES[:1]):
            table = f"{workload.name}; caches of {cache:,} tokens"
            if not options.wants(table):
                continue
            for name, make in _POLICIES.items():
                for seed in range(options.rounds):
                    random.seed(seed)
                    outcome = simulate(make, workload, costs=Costs(cache=cache), seed=seed)
                    report.add(
                        table,
                        name,
                        hit=outcome.hit_rate,
                        ttft_ms=outcome.ttft_p95_s * 1000,
                        makespan_s=outcome.makespan_s,
                        imbalance=outcome.imbalance,
                    )
            report.show(
                table,
                (
                    Column("hit", "hit rate", 2),
                    Column("ttft_ms", "TTFT p95 ms"),
                    Column("makespan_s", "makespan s", 1),
                    Column("imbalance", "busiest / mean", 2),
                ),
            )
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
