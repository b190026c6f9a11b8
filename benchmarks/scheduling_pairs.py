"""Prefill/decode pairs in the simulation of ``benchmarks.scheduling``, with several policies, beside regular workers.

Eight engines: either two or four of them prefill and the others decode, or all are regular. Keys and values are
transferred at 200,000 tokens a second. A pair's first token is the first one that the decode engine samples.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from benchmarks.options import parse
from benchmarks.report import Column, Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.fleets import At, MakeFleet, Pairs, Servers
from benchmarks.simulated.gateway import GatewayCacheAware
from benchmarks.simulated.outcomes import COLUMNS, figures
from benchmarks.simulated.simulation import simulate_fleet
from benchmarks.simulated.workloads import TINY, WORKLOADS
from slime_policies import CacheAware, LeastInflight, Policy, PowerOfTwo, Settings
from slime_policies.bucket import Bucket
from slime_policies.plugin import POLICIES
from slime_policies.tokens_in_flight import TokensInFlight

Clock = Callable[[], float]

_COSTS = Costs()
_TRANSFER_PER_S = 200_000.0
_COUNTS = ((2, 6), (4, 4))
_GATEWAY = "gateway's cache_aware, power_of_two"
_PAIRS: dict[str, Callable[[Clock], tuple[Policy, Policy]]] = {
    "random, random": lambda clock: (POLICIES["random"](Settings()), POLICIES["random"](Settings())),
    "round_robin, round_robin": lambda clock: (
        POLICIES["round_robin"](Settings()),
        POLICIES["round_robin"](Settings()),
    ),
    "bucket, power_of_two": lambda clock: (Bucket(Settings(), clock), PowerOfTwo()),
    _GATEWAY: lambda clock: (GatewayCacheAware(), PowerOfTwo()),
    "cache_aware, least_inflight": lambda clock: (CacheAware(Settings(), clock), LeastInflight()),
    "cache_aware, least_inflight, tokens": lambda clock: (
        CacheAware(Settings(), clock),
        LeastInflight(TokensInFlight(clock)),
    ),
}
_TPOT = Column("tpot_ms", "TPOT p95 ms", 1)
#: The beginnings of the names of those WORKLOADS that are simulated.
_CHOSEN = ("multi-turn, 128", "agents, 8,400-token system prompt, 128", "GRPO 64", "GRPO 32", "unrelated")


def _fleets() -> dict[str, MakeFleet]:
    def regular(clock: Clock, at: At) -> Servers:
        return Servers(CacheAware(Settings(), clock), sum(_COUNTS[0]), _COSTS, at)

    def pairs(name: str, counts: tuple[int, int]) -> MakeFleet:
        is_gateway = name == _GATEWAY
        return lambda clock, at: Pairs(
            _PAIRS[name](clock), counts, _COSTS, at, _TRANSFER_PER_S, holds_prefill=is_gateway
        )

    made: dict[str, MakeFleet] = {"8 regular: cache_aware": regular}
    for counts in _COUNTS:
        made |= {f"{counts[0]} + {counts[1]}: {name}": pairs(name, counts) for name in _PAIRS}
    return made


def main() -> int:
    options = parse(__doc__ or "", rounds=3)
    report = Report()
    chosen = tuple(workload for workload in WORKLOADS if workload.name.startswith(_CHOSEN))
    for workload in options.pick(chosen, tiny=TINY):
        if not options.wants(workload.name):
            continue
        for name, make in _fleets().items():
            for seed in range(options.rounds):
                random.seed(seed)
                report.add(workload.name, name, **figures(simulate_fleet(make, workload, seed=seed)))
        report.show(workload.name, (*COLUMNS[:2], _TPOT, *COLUMNS[2:]))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
