"""Metrics of the workers and of their weights."""

from __future__ import annotations

import time
from collections import Counter
from typing import get_args

from router_core import WeightUpdate
from router_core.router import Router
from router_core.workers import WorkerState
from slime_metrics.registry import Metrics

__all__ = ["Fleet"]


class Fleet:
    """Offers the metrics of the router's workers and of their weights, and remembers weight updates."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._pool = router.pool
        self._proxy = router.proxy
        self._weights = router.weights
        self._updates: Counter[str] = Counter()
        self._updated_at: float | None = None

    def updated(self, update: WeightUpdate) -> None:
        """Note new weights of the fleet."""
        self._updates[update.source] += 1
        self._updated_at = time.monotonic()

    def offer(self, metrics: Metrics) -> None:
        """Add the metrics."""
        metrics.gauge("slime_workers", "Workers by state.", self._states, ["state"])
        metrics.gauge(
            "slime_requests_in_flight", "Proxied requests that are being answered.", self._in_flight
        )
        metrics.gauge(
            "smg_http_connections_active",
            "slime_requests_in_flight, under the gateway's name.",
            self._in_flight,
        )
        metrics.gauge("smg_worker_pool_size", "Workers by type.", self._types, ["worker_type"])
        metrics.gauge(
            "smg_worker_health",
            "1: the worker gets requests. 0: something holds it back.",
            lambda: {worker.url: float(worker.is_healthy) for worker in self._pool},
            ["worker"],
        )
        metrics.gauge(
            "smg_worker_requests_active",
            "Requests in flight at a worker.",
            lambda: {worker.url: worker.load for worker in self._pool},
            ["worker"],
        )
        metrics.gauge(
            "slime_worker_holds",
            "1 for each reason why a worker gets no requests.",
            lambda: {(worker.url, owner): 1 for worker in self._pool for owner in worker.holds},
            ["worker", "reason"],
        )
        metrics.gauge(
            "smg_worker_routing_keys_active",
            "Sessions with requests in flight at a worker.",
            self._active_sessions,
            ["worker"],
        )
        metrics.gauge("slime_worker_connections", "Connections to workers.", self._connections, ["state"])
        metrics.gauge(
            "smg_worker_connections_active",
            "Busy connections to workers.",
            lambda: self._proxy.busy_connections,
        )
        metrics.gauge(
            "slime_weight_version", "The weight version of the fleet, if it is a number.", self._version
        )
        metrics.gauge(
            "slime_weight_version_info",
            "Always 1; the label has the weight version of the fleet, also one that is no number.",
            self._named_version,
            ["version"],
        )
        metrics.gauge(
            "slime_worker_weight_version_info",
            "Always 1; the label has the weight version of the worker.",
            self._worker_versions,
            ["worker", "version"],
        )
        metrics.gauge(
            "slime_weight_version_age_seconds",
            "Time since the fleet moved to its weights.",
            lambda: None if self._updated_at is None else time.monotonic() - self._updated_at,
        )
        metrics.counter(
            "slime_weight_updates_total",
            "Changes of the weight version of the fleet.",
            lambda: self._updates,
            ["source"],
        )
        metrics.gauge(
            "slime_worker_other_weights",
            "1: the worker has other weights than the fleet.",
            lambda: {worker.url: float(self._differs(worker.weight_version)) for worker in self._pool},
            ["worker"],
        )

    def _in_flight(self) -> int:
        return sum(exchange.parent is None for exchange in self._router.clients.exchanges)

    def _states(self) -> dict[str, int]:
        found = Counter(worker.state for worker in self._pool)
        return {state: found[state] for state in get_args(WorkerState)}

    def _types(self) -> Counter[str]:
        return Counter(worker.worker_type for worker in self._pool)

    def _connections(self) -> dict[str, int]:
        busy = self._proxy.busy_connections
        return {"busy": busy, "idle": self._proxy.open_connections - busy}

    def _version(self) -> float | None:
        version = self._weights.current
        is_number = version is not None and version.isascii() and version.isdigit() and len(version) < 16
        return float(version) if version is not None and is_number else None

    def _named_version(self) -> dict[str, int] | None:
        version = self._weights.current
        return None if version is None else {version: 1}

    def _worker_versions(self) -> dict[tuple[str, str], int]:
        return {
            (worker.url, worker.weight_version): 1
            for worker in self._pool
            if worker.weight_version is not None
        }

    def _active_sessions(self) -> dict[str, int]:
        """Count sessions by worker. ``exchange.session`` costs nothing: it was read when the worker was chosen."""
        active = {
            (exchange.worker.url, exchange.session)
            for exchange in self._router.clients.exchanges
            if exchange.worker is not None and exchange.session is not None
        }
        return {
            **dict.fromkeys((worker.url for worker in self._pool), 0),
            **Counter(url for url, _ in active),
        }

    def _differs(self, version: str | None) -> bool:
        return version is not None and version != self._weights.current
