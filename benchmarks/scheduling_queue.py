"""GRPO steps with a limit on the requests in flight, in the simulation of ``benchmarks.scheduling``.

All 512 requests of a step are sent at once. With the limit, at most 256 of them are in flight, and the others wait in
the router's queue: first come, first served, or the longest output first (``--queue-policy lof``). Without a limit, all
512 go to the 8 engines, each of which runs 64 at once. Each request says the exact length of its answer, the best case
for ``lof``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace

from benchmarks.options import parse
from benchmarks.report import Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.fleets import At, Fleet, MakeFleet, Servers
from benchmarks.simulated.outcomes import Makers, figures, show_outcomes
from benchmarks.simulated.queue import Limited
from benchmarks.simulated.simulation import simulate_fleet
from benchmarks.simulated.workloads import TINY, WORKLOADS
from router_core import Exchange
from slime_limits.queues import FirstCome, LongestFirst, Queue
from slime_policies import CacheAware, LeastInflight, Settings

_ENGINES, _REQUESTS, _LIMIT = 8, 512, 256
_TINY_REQUESTS, _TINY_LIMIT = 6, 2
_QUEUES: dict[str, Callable[[], Queue[Exchange] | None]] = {
    "no limit": lambda: None,
    "fcfs": FirstCome,
    "lof": LongestFirst,
}
_POLICIES: Makers = {
    "least_inflight": lambda clock: LeastInflight(),
    "cache_aware": lambda clock: CacheAware(Settings(), clock),
}


def _fleet(policy: str, queue: str, limit: int) -> MakeFleet:
    def make(clock: Callable[[], float], at: At) -> Fleet:
        servers = Servers(_POLICIES[policy](clock), _ENGINES, Costs(), at)
        waiting = _QUEUES[queue]()
        return servers if waiting is None else Limited(servers, limit, waiting, clock)

    return make


def main() -> int:
    options = parse(__doc__ or "", rounds=3)
    report = Report()
    steps = [workload for workload in WORKLOADS if workload.name.startswith(("GRPO 64", "GRPO with a few"))]
    requests, limit = options.pick((_REQUESTS, _LIMIT), tiny=(_TINY_REQUESTS, _TINY_LIMIT))
    for workload in options.pick(steps, tiny=[TINY[0]]):
        table = workload.name.replace(f"{workload.concurrent}", f"{requests}")
        workload = replace(workload, concurrent=requests)
        if not options.wants(table):
            continue
        for policy in _POLICIES:
            for queue in _QUEUES:
                for seed in range(options.rounds):
                    random.seed(seed)
                    outcome = simulate_fleet(_fleet(policy, queue, limit), workload, seed=seed)
                    report.add(table, f"{policy}, {queue}", **figures(outcome))
        show_outcomes(report, table)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
