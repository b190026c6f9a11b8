"""Bounds for the time to the first token of conversations, in the simulation of ``benchmarks.scheduling``.

*earliest* is no policy of the router: it knows the cache, the queue and the step of each engine, and chooses the engine
with the earliest first token. *shortest first*: the engines first prefill the prompt with the fewest tokens to prefill.
With sessions, each conversation keeps its engine. With 800 engines, each conversation has an engine of its own.
"""

from __future__ import annotations

import random
import sys

from benchmarks.options import parse
from benchmarks.report import Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.fleets import Earliest, MakeFleet, Servers
from benchmarks.simulated.gateway import GatewayCacheAware
from benchmarks.simulated.outcomes import figures, show_outcomes
from benchmarks.simulated.simulation import simulate_fleet
from benchmarks.simulated.workloads import TINY, WORKLOADS
from slime_policies import CacheAware, RoundRobin, Settings

_COSTS, _SHORTEST_FIRST = Costs(), Costs(shortest_first=True)
_WITHOUT, _WITH = WORKLOADS[0], WORKLOADS[1]  # the same conversations, without sessions and with them


def _kept(engines: int) -> MakeFleet:
    return lambda clock, at: Servers(RoundRobin(), engines, _COSTS, at)


def main() -> int:
    options = parse(__doc__ or "", rounds=3)
    report = Report()
    without, with_sessions = options.pick((_WITHOUT, _WITH), tiny=TINY)
    rows: dict[str, MakeFleet] = {
        "gateway's cache_aware": lambda clock, at: Servers(GatewayCacheAware(), 8, _COSTS, at),
        "cache_aware": lambda clock, at: Servers(CacheAware(Settings(), clock), 8, _COSTS, at),
        "earliest": lambda clock, at: Earliest(RoundRobin(), 8, _COSTS, at),
        "cache_aware, shortest first": lambda clock, at: Servers(
            CacheAware(Settings(), clock), 8, _SHORTEST_FIRST, at
        ),
        "earliest, shortest first": lambda clock, at: Earliest(RoundRobin(), 8, _SHORTEST_FIRST, at),
        "earliest, shortest first, 16 engines": lambda clock, at: Earliest(
            RoundRobin(), 16, _SHORTEST_FIRST, at
        ),
        "sessions, 16 engines": _kept(16),
        "sessions, 800 engines": _kept(800),
    }
    for name, make in rows.items():
        workload = with_sessions if name.startswith("sessions") else without
        for seed in range(options.rounds):
            random.seed(seed)
            report.add(without.name, name, **figures(simulate_fleet(make, workload, seed=seed)))
    show_outcomes(report, without.name)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
