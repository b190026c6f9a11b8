"""Functions that hold and release workers, as the router and its plugins do."""

from __future__ import annotations

from router_core.pool import WorkerPool
from router_core.workers import DRAINING, JOINING, Worker

__all__ = ["add_ready", "drain", "is_torn", "quarantine", "ready", "stale", "tear", "withheld"]


def quarantine(pool: WorkerPool, worker: Worker, reason: str) -> None:
    pool.hold(worker, "health", reason, "quarantined")
    pool.release(worker, JOINING, "weights")


def stale(pool: WorkerPool, worker: Worker, reason: str, owner: str = "weights") -> None:
    pool.hold(worker, owner, reason, "stale")
    pool.release(worker, JOINING, "health")


def tear(pool: WorkerPool, worker: Worker, reason: str = "it failed a control call") -> None:
    pool.hold(worker, "control", reason, "stale")
    pool.release(worker, JOINING, "health", "weights")


def is_torn(worker: Worker) -> bool:
    """Return True if ``worker`` is held because it failed a control call."""
    return "control" in worker.holds


def withheld(worker: Worker) -> bool:
    """Return True if the circuit breaker of ``worker`` holds it."""
    return "circuit breaker" in worker.holds


def drain(pool: WorkerPool, worker: Worker) -> None:
    pool.hold(worker, DRAINING, "a test", "draining")


def ready(pool: WorkerPool, worker: Worker) -> None:
    pool.release(worker, *worker.server.holds)


def add_ready(pool: WorkerPool, worker: Worker) -> Worker:
    pool.add(worker)
    ready(pool, worker)
    return worker
