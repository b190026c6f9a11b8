"""The workers, as the dashboard shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_core.router import Router
from router_core.workers import Worker

__all__ = ["fleet"]

#: Largest number of workers that are shown. Workers that get no requests come first.
_MAX_WORKERS = 200
#: Values of the metric ``smg_worker_cb_state``.
_BREAKERS = {0: "closed", 1: "open", 2: "half-open"}


def fleet(router: Router, breakers: Mapping[str, float] | None) -> dict[str, Any]:
    """Return a JSON object: the counts of all workers, and at most 200 workers with their state.

    ``breakers``: states of the circuit breakers by URL of the worker; None: the states are not known.
    """
    workers = sorted(router.pool, key=lambda worker: worker.is_healthy)
    return {
        "total": len(workers),
        "ready": router.pool.healthy,
        "passthrough": router.pool.passthrough,
        "workers": [_shown(worker, breakers) for worker in workers[:_MAX_WORKERS]],
    }


def _shown(worker: Worker, breakers: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "url": worker.url,
        "type": worker.worker_type,
        "state": worker.state,
        "holds": [[owner, hold.reason] for owner, hold in worker.holds.items()],
        "load": worker.load,
        "weight_version": worker.weight_version,
        "breaker": None if breakers is None else _BREAKERS[int(breakers.get(worker.url, 0))],
    }
