"""Outcomes of the simulation in a report."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.report import Column, Report
from benchmarks.simulated.simulation import simulate
from benchmarks.simulated.workloads import Workload
from slime_policies import Policy

__all__ = ["Makers", "add_outcome", "show_outcomes"]

#: Functions that make each policy, by its name, with the clock of the simulation.
Makers = Mapping[str, Callable[[Callable[[], float]], Policy]]

_COLUMNS = (
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
    outcome = simulate(makers[name], workload, seed=seed, **how)
    report.add(
        table,
        name,
        hit=outcome.hit_rate,
        ttft_ms=outcome.ttft_p95_s * 1000,
        makespan_s=outcome.makespan_s,
        imbalance=outcome.imbalance,
    )


def show_outcomes(report: Report, table: str) -> None:
    """Print ``table``."""
    report.show(table, _COLUMNS)
