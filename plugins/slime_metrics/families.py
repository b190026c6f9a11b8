"""The metrics of requests. Each metric adds up the series that agree in its labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from slime_metrics.counts import Counts, Kind, Series
from slime_metrics.histogram import Histogram, histogram_family
from slime_metrics.labels import ENDPOINTS, OTHER

__all__ = ["counter_family", "request_families"]

_Labels = tuple[str, ...]


def request_families(counts: Counts) -> Iterator[Metric]:
    """Yield the metrics of all requests that have ended."""
    yield counter_family(
        "smg_http_requests_total", "Requests that have ended.", ["method", "path"],
        _counted(counts, lambda kind: (kind.method, kind.path)),
    )  # fmt: skip
    yield counter_family(
        "smg_http_responses_total", "Answers by status, and by the code of the router's error.",
        ["status_code", "error_code"], _responses(counts),
    )  # fmt: skip
    yield counter_family(
        "slime_requests_total", "Requests that have ended, by the worker that was asked last.",
        ["path", "status", "worker"], _counted(counts, lambda kind: (kind.path, str(kind.status), kind.worker)),
    )  # fmt: skip
    incomplete: Counter[_Labels] = Counter()
    for kind, series in counts.series.items():
        for error, number in series.incomplete.items():
            incomplete[kind.path, kind.worker, error] += number
    yield counter_family(
        "slime_incomplete_answers_total", "Answers that broke off or failed after their head was sent.",
        ["path", "worker", "error"], incomplete,
    )  # fmt: skip
    yield counter_family(
        "slime_worker_failed_attempts_total", "Attempts at a worker that failed or were given up.",
        ["worker", "error"], counts.failed,
    )  # fmt: skip
    merged = partial(_merged, counts)
    yield histogram_family(
        "smg_http_request_duration_seconds", "Time from the head of a request to the end of its answer.",
        ["method", "path"], merged(lambda kind: (kind.method, kind.path), lambda series: series.whole),
    )  # fmt: skip
    yield histogram_family(
        "slime_time_to_worker_seconds",
        "Time from the head of a request until the worker that answered got it; 0 without an answer.",
        ["path"], merged(lambda kind: (kind.path,) if kind.worker else ("",), lambda series: series.to_worker),
    )  # fmt: skip
    yield histogram_family(
        "smg_router_ttft_seconds", "Time from the head of a request to the first byte of its streamed answer.",
        ["endpoint"],
        merged(lambda kind: (ENDPOINTS.get(kind.path, OTHER),), lambda series: series.to_first_byte),
    )  # fmt: skip
    yield histogram_family(
        "slime_worker_duration_seconds",
        "Time from when a worker got a request to the end of its answer; without an answer, the whole time.",
        ["worker"], merged(lambda kind: (kind.worker,), lambda series: series.at_worker),
    )  # fmt: skip


def counter_family(name: str, help: str, labels: list[str], numbers: Counter[_Labels]) -> CounterMetricFamily:
    """Return the counter ``name`` with ``numbers`` by the values of ``labels``."""
    family = CounterMetricFamily(name, help, labels=labels)
    for values, number in numbers.items():
        family.add_metric(values, number)
    return family


def _counted(counts: Counts, labels: Callable[[Kind], _Labels]) -> Counter[_Labels]:
    found: Counter[_Labels] = Counter()
    for kind, series in counts.series.items():
        found[labels(kind)] += series.whole.count
    return found


def _responses(counts: Counts) -> Counter[_Labels]:
    """Count answers. Those without an error have no code."""
    found = _counted(counts, lambda kind: (str(kind.status), ""))
    for (status, code), number in counts.errors.items():
        found[str(status), code] += number
        found[str(status), ""] -= number
    return +found


def _merged(
    counts: Counts, labels: Callable[[Kind], _Labels], which: Callable[[Series], Histogram]
) -> dict[_Labels, Histogram]:
    found: dict[_Labels, Histogram] = {}
    for kind, series in counts.series.items():
        histogram = which(series)
        key = labels(kind)
        if not (key[0] and histogram.count):  # no worker was asked, or there are no durations
            continue
        if key not in found:
            found[key] = Histogram(histogram.bounds)
        found[key].add(histogram)
    return found
