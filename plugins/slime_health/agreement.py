"""Comparisons of workers in a fleet: the version on which they agree, and the workers that can replace one. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from router_core import Worker
from router_core.weights import WeightVersions
from slime_health.judge import AS_STARTED, fit

__all__ = ["agreed", "missed_control_call", "newer_than_the_fleet", "others_serve", "stands_in"]


def missed_control_call(worker: Worker) -> bool:
    """Return True while ``worker`` has missed a control call: then the version that it reports proves nothing."""
    return "control" in worker.holds


def agreed(workers: Iterable[Worker]) -> str | None:
    """Return the only version that workers name; None when they name several versions, or no version.

    Only ready workers count. If no worker is ready, stale workers count, except those whose weights were never updated.
    A worker does not count if it names no version or has missed a control call.
    """
    there = list(workers)
    named = {_named(worker) for worker in there if worker.state == "ready"}
    named = named or {_named(worker) for worker in there if worker.state == "stale"} - {AS_STARTED}
    named -= {None}
    return named.pop() if len(named) == 1 else None


def newer_than_the_fleet(workers: Iterable[Worker], weights: WeightVersions) -> str | None:
    """Return the newest version that is ahead of the fleet's and that at least half of the ready workers report.

    A worker does not count if it reports no version or has missed a control call.
    """
    named = Counter(_named(worker) for worker in workers if worker.state == "ready")
    del named[None]
    many = [
        version
        for version, count in named.items()
        if 2 * count >= named.total() and fit(version, weights.current, weights.past) == "ahead"
    ]
    newest: str | None = None
    for version in many:
        if newest is None or fit(version, newest, ()) == "ahead":
            newest = version
    return newest


def stands_in(workers: Iterable[Worker], worker: Worker, weights: WeightVersions) -> bool:
    """Return True when another worker of the same type serves, and names the fleet's version or a newer one."""
    return any(
        _named(other) is not None and fit(other.said_version, weights.current, weights.past) != "other"
        for other in _serving_beside(workers, worker)
    )


def others_serve(workers: Iterable[Worker], worker: Worker) -> bool:
    """Return True when another worker of the same type serves."""
    return any(True for _ in _serving_beside(workers, worker))


def _serving_beside(workers: Iterable[Worker], worker: Worker) -> Iterable[Worker]:
    kind = worker.worker_type
    return (
        other for other in workers if other is not worker and other.is_healthy and other.worker_type == kind
    )


def _named(worker: Worker) -> str | None:
    return None if missed_control_call(worker) else worker.said_version
