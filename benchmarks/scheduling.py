"""Policies in a simulation of engines with KV caches: hit rate, time to the first token, makespan, balance.

Nothing is timed, so a run depends only on its seeds. The gateway's policy is reimplemented for the simulation.
*earliest* is no policy of the router, but a bound: see ``benchmarks.scheduling_bound``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.options import flags, read
from benchmarks.report import Report
from benchmarks.simulated.engine import Costs
from benchmarks.simulated.fleets import Earliest
from benchmarks.simulated.gateway import GatewayCacheAware
from benchmarks.simulated.outcomes import Makers, add_outcome, figures, show_outcomes
from benchmarks.simulated.plot import drawn
from benchmarks.simulated.simulation import simulate_fleet
from benchmarks.simulated.workloads import TINY, WORKLOADS
from slime_policies import Auto, CacheAware, LeastInflight, Policy, PowerOfTwo, RoundRobin, Settings
from slime_policies.plugin import POLICIES
from slime_policies.tokens_in_flight import TokensInFlight

_AUTO, _CACHE_AWARE, _GATEWAY, _BOUND = "auto", "cache_aware", "gateway's cache_aware", "earliest"
_LEAST = "least_inflight"
#: The workload in which *earliest* is simulated. Even *earliest* misses the wanted TTFT, 0.8 times the gateway's.
_MULTI_TURN = "multi-turn, 128"
#: End of the name of a row whose requests do not tell the length of their answers (``max_new_tokens`` is null).
_NO_LENGTHS = ", no lengths"
#: Where sessions keep their engine, engines that join late get no earlier conversation. So the imbalance is 2 at best.
_UNBALANCED = {workload.name for workload in WORKLOADS if workload.joined_s and workload.has_sessions}
#: Where engines join late, results differ by half from seed to seed. Such a workload gets this many times the seeds.
_LATE_SEEDS = 3
_SVG = Path(__file__).resolve().parent.parent / "docs" / "images" / "scheduling.svg"


def _made(name: str) -> Callable[[Callable[[], float]], Policy]:
    return lambda clock: POLICIES[name](Settings())


_POLICIES: Makers = {
    "round_robin": _made("round_robin"),
    "least_inflight": _made("least_inflight"),
    "power_of_two": _made("power_of_two"),
    "prefix_hash": _made("prefix_hash"),
    _GATEWAY: lambda clock: GatewayCacheAware(),
    _CACHE_AWARE: lambda clock: CacheAware(Settings(), clock),
    _AUTO: lambda clock: Auto(Settings(), clock),
    f"{_CACHE_AWARE}{_NO_LENGTHS}": lambda clock: CacheAware(Settings(), clock),
    "least_inflight, tokens": lambda clock: LeastInflight(TokensInFlight(clock)),
    "power_of_two, tokens": lambda clock: PowerOfTwo(TokensInFlight(clock)),
    f"least_inflight, tokens{_NO_LENGTHS}": lambda clock: LeastInflight(TokensInFlight(clock)),
    f"power_of_two, tokens{_NO_LENGTHS}": lambda clock: PowerOfTwo(TokensInFlight(clock)),
}


class _Gates:
    """Conditions for ``cache_aware`` and ``auto``, each printed with the figure that decides it."""

    def __init__(self, report: Report) -> None:
        self._samples = report.samples

    def show(self) -> None:
        """Print each condition of the workloads that were run, and whether it holds."""
        print("\nconditions of cache_aware and auto (medians of the seeds)")
        for workload in self._samples:
            for figure in ("ttft_ms", "makespan_s"):
                self._at_most(workload, figure, "round_robin", 1.03)
                self._at_most(workload, figure, "round_robin", 1.03, _AUTO)
                self._at_most(workload, figure, _LEAST, 1.03, _AUTO)
            for policy in (_CACHE_AWARE, _AUTO):
                if policy == _AUTO or workload not in _UNBALANCED:
                    imbalance = self._of(workload, policy, "imbalance")
                    self._tell(f"{workload}: busiest / mean of {policy}", imbalance, 1.5)
            if workload == _MULTI_TURN:
                self._at_most(workload, "ttft_ms", _GATEWAY, 0.8)
                bound = self._of(workload, _BOUND, "ttft_ms") / self._of(workload, _GATEWAY, "ttft_ms")
                print(
                    f"  bound  {bound:5.3f}                 this ratio of {_BOUND}, which knows each engine's state"
                )
            elif workload.startswith("agents, ") and workload.endswith("128"):
                self._at_most(workload, "ttft_ms", _GATEWAY, 0.5)
            elif workload.startswith("GRPO 64"):
                self._at_most(workload, "makespan_s", _LEAST, 0.88)

    def _at_most(
        self, workload: str, figure: str, other: str, factor: float, policy: str = _CACHE_AWARE
    ) -> None:
        ratio = self._of(workload, policy, figure) / self._of(workload, other, figure)
        self._tell(f"{workload}: {figure} of {policy} / that of {other}", ratio, factor)

    def _of(self, workload: str, policy: str, figure: str) -> float:
        return median(sample[figure] for sample in self._samples[workload][policy])

    def _tell(self, text: str, found: float, most: float) -> None:
        print(f"  {'held  ' if found <= most else 'MISSED'} {found:5.3f} (at most {most:.2f})  {text}")


def main() -> int:
    parser = flags(__doc__ or "", rounds=3)
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=_SVG, metavar="FILE",
        help="draw the figures into FILE (without FILE: into %(const)s)",
    )  # fmt: skip
    given = parser.parse_args()
    options = read(given)
    report = Report()
    for workload in options.pick(WORKLOADS, tiny=TINY):
        if not options.wants(workload.name):
            continue
        for name in _POLICIES:
            for seed in range(options.rounds * (_LATE_SEEDS if workload.joined_s else 1)):
                lengths = not name.endswith(_NO_LENGTHS)
                add_outcome(report, workload.name, _POLICIES, name, workload, seed, names_lengths=lengths)
        if workload.name == _MULTI_TURN:
            for seed in range(options.rounds):
                found = simulate_fleet(
                    lambda clock, at: Earliest(RoundRobin(), 8, Costs(), at), workload, seed=seed
                )
                report.add(workload.name, _BOUND, **figures(found))
        show_outcomes(report, workload.name)
    _Gates(report).show()
    if given.plot is not None:
        given.plot.write_text(drawn(report.samples, [name for name in _POLICIES if ", " not in name]))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
