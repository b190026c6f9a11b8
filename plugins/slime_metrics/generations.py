"""Metrics of generations under the names of the SGLang gateway, from the series that exist anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from slime_metrics.counts import Counts, Kind
from slime_metrics.families import counter_family
from slime_metrics.histogram import Histogram, histogram_family
from slime_metrics.labels import ENDPOINTS

__all__ = ["generation_families"]

#: Statuses of requests that are refused for their key or for a limit. The gateway refuses such requests before it
#: counts them as routed.
_REFUSED = (401, 403, 408, 429)
_CLIENT_GONE = 499


def generation_families(counts: Counts) -> Iterator[Metric]:
    """Yield the metrics of all generations that have ended, but for refused ones."""
    requests: Counter[tuple[str, ...]] = Counter()
    errors: Counter[tuple[str, ...]] = Counter()
    durations: dict[tuple[str, ...], Histogram] = {}
    for kind, series in counts.series.items():
        endpoint = ENDPOINTS.get(kind.path)
        if endpoint is None or (not kind.worker and kind.status in _REFUSED):
            continue
        requests[endpoint,] += series.whole.count
        if 200 <= kind.status < 300:
            durations.setdefault((endpoint,), Histogram(counts.bounds)).add(series.whole)
        elif kind.status != _CLIENT_GONE:
            errors[endpoint, _error_type(kind)] += series.whole.count
    yield counter_family(
        "smg_router_requests_total",
        "Generations that have ended, but for refused ones.",
        ["endpoint"],
        requests,
    )
    yield counter_family(
        "smg_router_request_errors_total", "Generations that failed.", ["endpoint", "error_type"], errors
    )
    yield histogram_family(
        "smg_router_request_duration_seconds",
        "Time from the head of a generation to the end of its answer, if it succeeded.",
        ["endpoint"], durations,
    )  # fmt: skip


def _error_type(kind: Kind) -> str:
    """Return the gateway's word for a failure, by its status. For a 503, the word also depends on ``kind.worker``."""
    status = kind.status
    if status == 404 or (status == 503 and not kind.worker):
        return "no_workers"
    if status in (408, 504):
        return "timeout"
    if status == 400:
        return "validation_error"
    return "backend_error" if status >= 500 else "internal_error"
