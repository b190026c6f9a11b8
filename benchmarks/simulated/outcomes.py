"""Outcomes of the simulation in a report."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.report import Column, Report
from benchmarks.simulated.simulation import Outcome, simulate
from benchmarks.simulated.workloads import Workload
from slime_policies import Policy

__all__ = ["COLUMNS", "Makers", "add_outcome", "figures", "show_outcomes"]

#: By the name of a policy, the function that makes it. The argument is the clock of the simulation.
Makers = Mapping[str, Callable[[Callable[[], float]], Policy]]

COLUMNS = (
    Column("hit", "hit rate", 2),
    Column("ttft_ms", "TTFT p95 ms"),
    Column("makespan_s", "makespan s", 1),
    Column("imbalance", "busiest / mean", 2),
)


def add_outcome(
    report: Report, table: str, makers: Makers, name: str, workload: Workload, seed: int, **how: Any
) -> None:
    """Run ``workload`` with the policy ``name``, and add its figures to ``table``. ``how``: see :func:`simulate`."""
    random.seed(seed)
    report.add(table, name, **figures(simulate(makers[name], workload, seed=seed, **how)))


def figures(outcome: Outcome) -> dict[str, float]:
    """Return the figures of ``outcome`` by the names of the columns."""
    return {
        "hit": outcome.hit_rate,
        "ttft_ms": outcome.ttft_p95_s * 1000,
        "tpot_ms": outcome.tpot_p95_s * 1000,
        "makespan_s": outcome.makespan_s,
        "imbalance": outcome.imbalance,
    }


def show_outcomes(report: Report, table: str) -> None:
    """Print ``table``."""
    report.show(table, COLUMNS)
