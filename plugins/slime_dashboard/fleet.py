"""The workers and their weights, as the dashboard shows them."""

from __future__ import annotations

from typing import Any

from router_core.router import Router
from router_core.workers import Worker

__all__ = ["fleet"]

#: Workers that are shown; of a larger fleet those that get no requests come first.
_MAX_WORKERS = 200


def fleet(router: Router) -> dict[str, Any]:
    """Return the workers, ready for JSON: at most 200 of them, and the number of all."""
    workers = sorted(router.pool, key=lambda worker: worker.is_healthy)
    return {
        "total": len(workers),
        "ready": router.pool.healthy,
        "weight_version": router.weights.current,
        "workers": [_shown(worker) for worker in workers[:_MAX_WORKERS]],
    }


def _shown(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "type": worker.worker_type,
        "state": worker.state,
        "holds": {owner: hold.reason for owner, hold in worker.holds.items()},
        "load": worker.load,
        "weight_version": worker.weight_version,
    }
