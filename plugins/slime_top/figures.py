"""Figures of a router, computed from its scrapes of the last minute. No I/O."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_top.scrape import Samples, Scrape

__all__ = ["Figures", "History", "Latency", "WorkerFigures"]

#: Seconds of the past that the rates, and the latencies, are computed from.
_RATE_S, _LATENCY_S = 10.0, 60.0
#: Values of the label ``error`` that are no errors: None (an older router has no such label), or the client left.
_NO_ERRORS = (None, "client_gone")
_BREAKERS = {0.0: "closed", 1.0: "open", 2.0: "half-open"}
_Take = Callable[[Samples], float | None]


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles in seconds, interpolated in the buckets of a histogram."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A row of the table. ``holds``: reasons by owner. ``tokens_per_s``: None if the engine has no metrics."""

    url: str
    state: str
    holds: Mapping[str, str]
    in_flight: int
    tokens_per_s: float | None
    weight_version: str | None
    breaker: str | None


@dataclass(frozen=True, slots=True)
class Figures:
    """The contents of a frame. None: the router has no such number.

    ``has_metrics``: the router has the plugin ``metrics``.
    ``has_records``: the router has the plugin ``radix_cache``, which counts ``generated`` and ``retrieved``.
    ``generated`` and ``retrieved``: numbers of generations and of retrievals. The key is ``exact``, or the reason why
    the tokens are not exact.
    ``latency_span_s`` is None if the latencies are those of all requests since the router's start.
    """

    has_metrics: bool
    version: str | None
    up_s: float | None
    weight_version: str | None
    weights_age_s: float | None
    is_paused: bool
    paused_requests: int
    queued: int | None
    in_flight: int
    requests_per_s: float | None
    errors: Mapping[str, int]
    retries: int
    latency: Latency | None
    first_byte: Latency | None
    latency_span_s: float | None
    tokens_in_per_s: float | None
    tokens_out_per_s: float | None
    cache_hit_rate: float | None
    has_records: bool
    generated: Mapping[str, int]
    retrieved: Mapping[str, int]
    workers: list[WorkerFigures] = field(default_factory=list)


class History:
    """The scrapes of the last minute. If the router is restarted, the history begins anew."""

    def __init__(self) -> None:
        self._scrapes: deque[Scrape] = deque()

    def add(self, scrape: Scrape) -> None:
        """Add the newest scrape."""
        if self._scrapes and _started_at(self._scrapes[-1]) != _started_at(scrape):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while self._scrapes[0].at < scrape.at - _LATENCY_S:
            self._scrapes.popleft()

    def figures(self, now: float) -> Figures:
        """Return the figures of the newest scrape; ``now``: Unix time in seconds."""
        newest = self._scrapes[-1]
        metrics = newest.metrics
        started_at = _started_at(newest)
        latency, first_byte, span_s = self._latencies()
        out = self._rate(lambda samples: samples.total("smg_router_tokens_total", token_type="output"))
        workers = [self._worker(worker) for worker in newest.workers]
        if out is None:  # without radix_cache, only the engines count tokens
            known = [worker.tokens_per_s for worker in workers if worker.tokens_per_s is not None]
            out = sum(known) if known else None
        return Figures(
            has_metrics=metrics.total("slime_requests_in_flight") is not None,
            version=next((labels["version"] for labels, _ in metrics.of("slime_router_info")), None),
            up_s=None if started_at is None else max(0.0, now - started_at),
            weight_version=newest.weight_version,
            weights_age_s=metrics.total("slime_weight_version_age_seconds"),
            is_paused=bool(metrics.total("slime_generation_paused")),
            paused_requests=int(metrics.total("slime_requests_paused") or 0),
            queued=_whole(metrics.total("slime_requests_queued")),
            in_flight=int(metrics.total("slime_requests_in_flight") or 0),
            requests_per_s=self._rate(_at_workers),
            errors=_errors(metrics),
            retries=int(metrics.total("smg_worker_retries_total") or 0),
            latency=latency,
            first_byte=first_byte,
            latency_span_s=span_s,
            tokens_in_per_s=self._rate(
                lambda samples: samples.total("smg_router_tokens_total", token_type="input")
            ),
            tokens_out_per_s=out,
            cache_hit_rate=self._hit_rate(),
            has_records=metrics.total("slime_cache_tokens") is not None,
            generated=_counts(metrics.by("slime_generations_total", "reason")),
            retrieved=_counts(metrics.by("slime_retrieved_answers_total", "reason")),
            workers=workers,
        )

    def _since(self, span_s: float) -> Scrape | None:
        """Return the oldest scrape of the last ``span_s`` seconds, but not the newest scrape of all.

        If there is no such scrape, return the scrape before the newest, or None.
        """
        newest = self._scrapes[-1]
        earlier = [scrape for scrape in self._scrapes if scrape is not newest]
        within = (scrape for scrape in earlier if scrape.at >= newest.at - span_s)
        return next(within, earlier[-1] if earlier else None)

    def _rate(self, take: _Take, which: Callable[[Scrape], Samples] = lambda scrape: scrape.metrics) -> Any:
        newest, before = self._scrapes[-1], self._since(_RATE_S)
        value = take(which(newest))
        if before is None or value is None:
            return None
        return max(0.0, value - (take(which(before)) or 0.0)) / max(newest.at - before.at, 1e-9)

    def _worker(self, worker: Mapping[str, Any]) -> WorkerFigures:
        newest, url = self._scrapes[-1], worker["url"]
        breaker = newest.metrics.total("smg_worker_cb_state", worker=url)
        return WorkerFigures(
            url=url,
            state=worker["state"],
            holds=worker["holds"],
            in_flight=worker["load"],
            tokens_per_s=self._rate(
                lambda samples: samples.total("sglang_generation_tokens_total", worker_addr=url),
                lambda scrape: scrape.engines,
            ),
            weight_version=worker["weight_version"],
            breaker=None if breaker is None else _BREAKERS.get(breaker, "?"),
        )

    def _hit_rate(self) -> float | None:
        newest, before = self._scrapes[-1], self._since(_LATENCY_S)
        prompts = newest.metrics.by("slime_cache_prompts_total", "result")
        if before is not None:
            recent = prompts - before.metrics.by("slime_cache_prompts_total", "result")
            prompts = recent if recent.total() else prompts
        return prompts["hit"] / prompts.total() if prompts.total() else None

    def _latencies(self) -> tuple[Latency | None, Latency | None, float | None]:
        """Return the latencies of whole answers and of first bytes, and their span in seconds.

        The requests that ended in the last minute count. If there are none, all requests since the router's start
        count, and the span is None.
        """
        newest, before = self._scrapes[-1], self._since(_LATENCY_S)
        paths = {labels["path"] for labels, _ in newest.metrics.of("slime_time_to_worker_seconds_count")}

        def buckets(scrape: Scrape, name: str, paths: Iterable[str] | None) -> Counter[float]:
            found: Counter[float] = Counter()
            for labels, value in scrape.metrics.of(f"{name}_bucket"):
                if paths is None or labels["path"] in paths:
                    found[float(labels["le"])] += int(value)
            return found

        def both(older: Scrape | None) -> tuple[Latency | None, Latency | None]:
            found = []
            for name, only in (
                ("smg_http_request_duration_seconds", paths),
                ("smg_router_ttft_seconds", None),
            ):
                counts = buckets(newest, name, only)
                if older is not None:
                    counts.subtract(buckets(older, name, only))
                found.append(_latency(counts))
            return found[0], found[1]

        recent = both(before)
        if before is not None and recent[0] is not None:
            return *recent, newest.at - before.at
        return *both(None), None


def _started_at(scrape: Scrape) -> float | None:
    return scrape.metrics.total("process_start_time_seconds")


def _at_workers(samples: Samples) -> float | None:
    """Return the number of requests that went to a worker; None without metrics."""
    if samples.total("slime_requests_in_flight") is None:
        return None
    return sum(value for labels, value in samples.of("slime_requests_total") if labels["worker"])


def _errors(samples: Samples) -> dict[str, int]:
    found: Counter[str] = Counter()
    for labels, value in samples.of("smg_http_responses_total"):
        if labels["status_code"] >= "400" and value:
            found[labels["error_code"] or labels["status_code"]] += int(value)
    for labels, value in samples.of("slime_incomplete_answers_total"):
        if labels.get("error") not in _NO_ERRORS and value:
            found[labels["error"]] += int(value)
    return dict(found.most_common())


def _counts(found: Counter[str]) -> dict[str, int]:
    return {name: int(value) for name, value in found.most_common() if value}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _latency(buckets: Mapping[float, int]) -> Latency | None:
    """Return the quantiles, as Prometheus computes them. ``buckets``: cumulative counts by upper bound."""
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None

    def quantile(share: float) -> float:
        rank = share * buckets[bounds[-1]]
        lower, below = 0.0, 0
        for bound in bounds:
            if buckets[bound] >= rank:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (rank - below) / max(buckets[bound] - below, 1)
            lower, below = bound, buckets[bound]
        return lower

    return Latency(quantile(0.5), quantile(0.95))
