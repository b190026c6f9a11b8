"""Counts by batches equal counts one by one."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from router_core.proxy import PATH, SENT_AT, WORKER
from slime_http.asgi import FAILED
from slime_http.observed import ObservedRequest
from slime_metrics.counts import _MAX_REMOVED, _REMOVED_S, CLIENT_GONE, REMOVED, Counts
from slime_metrics.labels import ENDPOINTS, Labels
from slime_metrics.traffic import GenerationTraffic

BOUNDS = (0.1, 1.0, 5.0)
#: Bytecode instructions for a plain answer of a worker. Each request pays for them.
_MAX_STEPS = 75
PATTERNS = [re.compile("^/workers/(?P<worker_id>[^/]+)$"), re.compile("^/pages/(?P<number>[0-9]+)$")]
PATHS = [
    "/generate",
    "/v1/chat/completions",
    "/workers/w",
    "/workers/{worker_id}",
    "/pages/7",
    "/pages/{number}",
    "*",
]
STATUSES = [200, 200, 200, 200, 0, 201, 299, 404, 499, 503, 599, 99, 777]
ERRORS = [b'{"error":{"code":"NO_WORKER"}}', b'{"error":{"code":"ITS_OWN"}}', b"{", b""]


class OneByOne:
    """The naive model: each request is counted as it ends."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.requests: list[tuple[list[Any], Any]] = []
        self.known: set[str] = set()
        self.removed: dict[str, float] = {}

    def add(self, request: Any) -> None:
        state, labels = request.scope["state"], self.labels
        worker = state[WORKER].url if WORKER in state else ""
        if worker and worker not in self.known and worker not in self.removed:
            worker = REMOVED
        path = labels.path(state.get(PATH, request.scope["path"]))
        kind = [labels.method(request.scope["method"]), path, labels.status(request.status), worker]
        self.requests.append((kind, request))

    def tidy(self, now: float) -> None:
        too_many = len(self.removed) - _MAX_REMOVED
        old = [
            one
            for place, (one, at) in enumerate(self.removed.items())
            if place < too_many or at < now - _REMOVED_S
        ]
        for worker in old:
            del self.removed[worker]
            for kind, _ in self.requests:
                kind[3] = REMOVED if kind[3] == worker else kind[3]

    def numbers(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        found: dict[tuple[Any, ...], list[Any]] = {}
        for kind, request in self.requests:
            found.setdefault(tuple(kind), []).append(request)
        return {
            kind: (
                *(histogram(times) for times in zip(*map(times_of, requests), strict=True)),
                histogram([one.streamed_at - one.began for one in requests if one.streamed_at]),
                Counter(filter(None, map(failure_of, requests))),
            )
            for kind, requests in found.items()
        }


def failure_of(request: Any) -> str | None:
    failure: str | None = request.scope["state"].get(FAILED)
    if failure is not None and request.status < 400:
        return failure if failure == "WORKER_BROKE" else "other"
    return None if request.is_whole else CLIENT_GONE


def times_of(request: Any) -> tuple[float, float, float]:
    sent_at = request.scope["state"].get(SENT_AT, request.began)
    return request.ended - request.began, sent_at - request.began, request.ended - sent_at


def histogram(times: Any) -> tuple[list[int], Any]:
    counts = [0] * (len(BOUNDS) + 1)
    for each in times:
        counts[next((place for place, bound in enumerate(BOUNDS) if each <= bound), len(BOUNDS))] += 1
    return counts, pytest.approx(sum(times))


def ended(some: random.Random, worker: str) -> ObservedRequest:
    """A request that ended, with times that are sums of powers of two, so that no order rounds them."""
    began = some.randrange(1, 1 << 12) / 1024
    scope: dict[str, Any] = {
        "method": some.choice(["GET", "POST", "BREW", "OTHER"]),
        "path": some.choice(PATHS),
    }
    state: dict[str, Any] = {}
    scope["state"] = state
    if some.random() < 0.8:
        state[WORKER] = SimpleNamespace(url=worker)
        if some.random() < 0.9:
            state[SENT_AT] = began + some.choice([0, 1 / 4096, 1 / 8, 2])
    if some.random() < 0.2:
        state[PATH] = some.choice(PATHS)
    end = state.get(SENT_AT, began) + some.choice([0.0, 0.125, 1.0, 8.0])
    request = ObservedRequest()
    request.scope = scope
    request.began = began
    request.ended = end
    request.streamed_at = some.choice([0.0, 0.0, end])
    request.status = some.choice(STATUSES)
    request.is_whole = some.random() < 0.9
    if request.streamed_at and some.random() < 0.2:
        state[FAILED] = some.choice(["WORKER_BROKE", "ITS_OWN"])
    request.error = some.choice(ERRORS)
    return request


def numbers_of(counts: Counts) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {
        tuple(kind): (
            *((one.counts, one.total_s) for one in (series.whole, series.to_worker, series.at_worker)),
            (series.to_first_byte.counts, series.to_first_byte.total_s),
            series.incomplete,
        )
        for kind, series in counts.series.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_those_one_by_one(seed: int) -> None:
    some = random.Random(seed)
    now = 0.0
    labels = Labels(PATTERNS)
    counts, naive = Counts(BOUNDS, lambda: now), OneByOne(labels)
    counts.know(labels)
    workers = [f"http://w{number}" for number in range(130)]
    for _ in range(3000):
        kind = some.random()
        worker = some.choice(workers[: some.choice([3, 130])])
        if kind < 0.9:
            request = ended(some, worker)
            counts.add(request)
            naive.add(request)
        elif kind < 0.94:
            counts.worker_added(worker)
            naive.known.add(worker)
            naive.removed.pop(worker, None)
        elif kind < 0.98 and worker in naive.known:
            counts.worker_removed(worker)
            naive.known.discard(worker)
            naive.removed[worker] = now
            naive.tidy(now)
        elif kind < 0.985:
            now += some.choice([1.0, 400.0])
        elif kind < 0.99:
            counts.tidy()
            naive.tidy(now)
        elif kind < 0.992:
            assert numbers_of(counts) == naive.numbers()
    assert numbers_of(counts) == naive.numbers()
    errors = Counter(labels.status(one.status) for _, one in naive.requests if one.status >= 400)
    assert sum(counts.errors.values()) == sum(errors.values())
    assert {
        status: sum(n for (one, _), n in counts.errors.items() if one == status) for status in errors
    } == errors
    totals = GenerationTraffic(counts).totals()
    assert sum(totals.by_class.values()) == sum(kind[1] in ENDPOINTS for kind, _ in naive.requests)


def test_counting_a_plain_answer_takes_few_steps() -> None:
    counts = Counts(BOUNDS, lambda: 0.0)
    counts.worker_added("http://w")
    request = ObservedRequest()
    state = {WORKER: SimpleNamespace(url="http://w"), SENT_AT: 1.0}
    request.scope = {"method": "POST", "path": "/generate", "state": state}
    request.began, request.ended, request.streamed_at = 1.0, 2.0, 0.0
    request.status, request.is_whole, request.error = 200, True, b""
    counts.add(request)  # the first one with its worker and path
    assert bytecodes(lambda: counts.add(request)) <= _MAX_STEPS


def bytecodes(call: Callable[[], object]) -> int:
    """Return the number of bytecode instructions that Python executes in ``call``."""
    steps = 0

    def traced(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps
