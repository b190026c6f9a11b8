"""Data-parallel ranks in the simulation of ``benchmarks.scheduling``: with ``--dp-aware``, and without.

Without ``--dp-aware`` the router chooses a server, and the server uses its ranks in turn. The first tables have one
server with eight ranks and conversations of three turns, like a measurement with the SGLang gateway: see
``docs/plugins/dp.md``. The other tables have two servers with four ranks each. In some tables the ranks step together,
as with SGLang's ``--enable-dp-attention``.
"""

from __future__ import annotations

import random
import sys

from benchmarks.options import Options, parse
from benchmarks.report import Column, Report
from benchmarks.simulated.fleets import Ranks
from benchmarks.simulated.outcomes import COLUMNS, Makers, figures
from benchmarks.simulated.simulation import simulate
from benchmarks.simulated.workloads import TINY, WORKLOADS, Workload, three_turns
from slime_policies import CacheAware, LeastInflight, Settings

_POLICIES: Makers = {
    "least_inflight": lambda clock: LeastInflight(),
    "cache_aware": lambda clock: CacheAware(Settings(), clock),
}
_TPOT = Column("tpot_ms", "TPOT p95 ms", 1)
_RATIOS = (
    Column("ttft_ratio", "TTFT on / off", 2),
    Column("tpot_ratio", "TPOT on / off", 2),
    Column("makespan_ratio", "makespan on / off", 2),
)
_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
#: The beginnings of the names of those WORKLOADS that are simulated.
_CHOSEN = ("multi-turn, 128", "agents, 8,400-token system prompt, 128", "GRPO 64", "GRPO 32", "unrelated")


def _measure(options: Options, report: Report, workload: Workload, servers: int, ranks: int) -> None:
    for together in (True, False):
        table = f"{workload.name}; {servers} x {ranks} ranks{' that step together' if together else ''}"
        if not options.wants(table):
            continue
        for name, make in _POLICIES.items():
            for seed in range(options.rounds):
                told: dict[bool, dict[str, float]] = {}
                for aware in (False, True):
                    random.seed(seed)
                    how = Ranks(ranks, aware=aware, together=together)
                    told[aware] = figures(simulate(make, workload, engines=servers, ranks=how, seed=seed))
                for figure in ("ttft", "tpot", "makespan"):
                    key = next(key for key in told[True] if key.startswith(figure))
                    told[True][f"{figure}_ratio"] = told[True][key] / told[False][key]
                for aware, mark in ((False, "off"), (True, "on")):
                    report.add(table, f"{name}, {mark}", **told[aware])
        report.show(table, (*COLUMNS[:2], _TPOT, *COLUMNS[2:], *_RATIOS))


def main() -> int:
    options = parse(__doc__ or "", rounds=3)
    report = Report()
    prompts = options.pick(32, tiny=1)
    for concurrent in options.pick(_CONCURRENCIES, tiny=(4,)):
        workload = Workload(
            f"three turns, {concurrent} at once", concurrent, 1, lambda rng: three_turns(rng, prompts)
        )
        _measure(options, report, workload, 1, 8)
    chosen = tuple(workload for workload in WORKLOADS if workload.name.startswith(_CHOSEN))
    for workload in options.pick(chosen, tiny=TINY):
        _measure(options, report, workload, 2, 4)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
