"""Counts and durations of requests by method, path, status and worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from struct import pack
from typing import Any, NamedTuple

import numpy as np

from router_core.proxy import PATH, SENT_AT, WORKER
from slime_http.asgi import FAILED
from slime_http.error_codes import code_in
from slime_http.observed import ObservedRequest
from slime_metrics.histogram import Histogram
from slime_metrics.labels import OTHER, Labels, error_codes

__all__ = ["CLIENT_GONE", "REMOVED", "Counts", "Kind", "Series"]

#: Value of the label ``worker`` for workers that were removed some time ago.
REMOVED = "removed"
#: Value of the label ``error`` for answers that broke off because the client left.
CLIENT_GONE = "client_gone"
#: Seconds for which the numbers of a removed worker keep its URL. If more than ``_MAX_REMOVED`` workers are removed in
#: this time, the numbers of those removed first lose the URL sooner.
_REMOVED_S = 600.0
_MAX_REMOVED = 100


class Kind(NamedTuple):
    """Requests with the same labels. ``worker``: the URL of the worker that was asked last; ``""`` if none was."""

    method: str
    path: str
    status: int
    worker: str


class Series:
    """The requests of one kind.

    ``whole``: durations from the head of the request to the end of the answer.
    ``to_first_byte``: durations from the head of the request to the first byte of a stream. ``incomplete``: answers
    that broke off or failed after their head was sent, by the code of the error, or ``CLIENT_GONE``.

    ``to_worker``: from the head of the request until the worker that answered got it; 0 if no worker answered.
    ``at_worker``: from then to the end of the answer.
    """

    __slots__ = ("at_worker", "incomplete", "to_first_byte", "to_worker", "whole")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.whole = Histogram(bounds)
        self.to_first_byte = Histogram(bounds)
        self.to_worker = Histogram(bounds)
        self.at_worker = Histogram(bounds)
        self.incomplete: Counter[str] = Counter()

    def observe(self, whole_s: float, to_worker_s: float) -> None:
        """Count a request by its whole duration, and by the time until its worker got it."""
        self.whole.observe(whole_s)
        self.to_worker.observe(to_worker_s)
        self.at_worker.observe(whole_s - to_worker_s)

    def observe_all(self, times_s: list[float]) -> None:
        """Count many requests. ``times_s``: for each request, when it began, when it ended, when a worker got it."""
        packed = pack(f"{len(times_s)}d", *times_s)  # numpy takes three times as long to read a list
        began, ended, sent_at = np.frombuffer(packed).reshape(-1, 3).T
        self.whole.observe_all(ended - began)
        self.to_worker.observe_all(sent_at - began)
        self.at_worker.observe_all(ended - sent_at)

    def add(self, other: Series) -> None:
        """Add the numbers of ``other``."""
        for name in ("whole", "to_first_byte", "to_worker", "at_worker"):
            getattr(self, name).add(getattr(other, name))
        self.incomplete += other.incomplete


class Counts:
    """All series. Their number has a bound, whatever clients send and however often workers come and go.

    The times of most requests are first collected. :meth:`settle` counts them, and must be called often. Counting each
    request at once would take some microseconds more under load.
    ``clock``: seconds. Only functions without ``await`` change the counts, so one event loop needs no lock.
    """

    def __init__(self, bounds: Sequence[float], clock: Callable[[], float]) -> None:
        self._series: dict[Any, Series] = {}  # by Kind
        #: By worker and path: the times of requests that are not counted yet, as :meth:`Series.observe_all` takes them.
        #: These are POST requests that a worker answered whole, with status 200, and not as a stream.
        self._new: dict[str, dict[str, list[float]]] = {}
        #: Errors by status and code.
        self.errors: Counter[tuple[int, str]] = Counter()
        #: Failed attempts by worker and error.
        self.failed: Counter[tuple[str, ...]] = Counter()
        self.bounds = bounds
        self._clock = clock
        self._labels = Labels(())
        self._codes = error_codes()
        self._workers: set[str] = set()
        self._removed: dict[str, float] = {}

    def know(self, labels: Labels) -> None:
        """Use the paths of ``labels`` from now on."""
        self._labels = labels
        self._codes = error_codes()  # all plugins are loaded

    @property
    def series(self) -> dict[Kind, Series]:
        """The series with all requests so far."""
        self.settle()
        return self._series

    def add(self, request: ObservedRequest) -> None:
        """Count ``request``, now or at the next :meth:`settle`."""
        scope = request.scope
        if (
            request.status == 200
            and request.is_whole
            and not request.streamed_at
            and scope["method"] == "POST"
        ):
            state = scope["state"]  # each look-up here adds to the cost of metrics
            try:
                sent_at = state[SENT_AT]
                new = self._new[state[WORKER].url][state[PATH] if PATH in state else scope["path"]]
            except KeyError:
                self._add_now(request)
            else:
                new.append(request.began)
                new.append(request.ended)
                new.append(sent_at)
        else:
            self._add_now(request)

    def _add_now(self, request: ObservedRequest) -> None:
        """Count ``request`` now. If a worker answered, :meth:`add` may collect later ones for this worker and path."""
        scope, status, began = request.scope, request.status, request.began
        state = scope["state"]
        path = state.get(PATH, scope["path"])
        worker = state[WORKER].url if WORKER in state else ""  # "": no worker was asked
        if SENT_AT in state:
            self._new.setdefault(worker, {}).setdefault(path, [])
        series = self.of(scope["method"], path, status, worker)
        series.observe(request.ended - began, state.get(SENT_AT, began) - began)
        if request.streamed_at:
            series.to_first_byte.observe(request.streamed_at - began)
        failure = state.get(FAILED) if status < 400 else None
        if failure is not None:  # the last event of a stream may be an error: then the answer is whole
            series.incomplete[failure if failure in self._codes else OTHER] += 1
        elif not request.is_whole:
            series.incomplete[CLIENT_GONE] += 1
        if status >= 400:
            self._error(status, request.error)

    def settle(self) -> None:
        """Count the requests whose times were only collected so far."""
        found: defaultdict[Series, list[float]] = defaultdict(list)
        for worker, by_path in self._new.items():
            for path, times_s in by_path.items():
                if times_s:
                    found[self.of("POST", path, 200, worker)] += times_s
        self._new = {}
        for series, times_s in found.items():
            series.observe_all(times_s)

    def of(self, method: str, path: str, status: int, worker: str) -> Series:
        """Return the series of a request. Labels from closed sets replace the values of the request."""
        labels = self._labels
        kind = Kind(labels.method(method), labels.path(path), labels.status(status), self._named(worker))
        found = self._series.get(kind)
        if found is None:
            found = self._series[kind] = Series(self.bounds)
        return found

    def _error(self, status: int, body: bytes) -> None:
        code = code_in(body)
        self.errors[Labels.status(status), code if code in self._codes else OTHER] += 1

    def failure(self, worker: str, code: str) -> None:
        """Count a failed attempt at ``worker``."""
        self.failed[self._named(worker), code if code in self._codes else "given_up"] += 1

    def _named(self, worker: str) -> str:
        return worker if not worker or worker in self._workers or worker in self._removed else REMOVED

    def worker_added(self, worker: str) -> None:
        """Use the URL ``worker`` as a label from now on."""
        self.settle()  # earlier requests with this URL keep their label
        self._removed.pop(worker, None)
        self._workers.add(worker)

    def worker_removed(self, worker: str) -> None:
        """Keep the numbers of ``worker`` for a while, since its last requests may still run."""
        self.settle()  # while the URL is a label
        self._workers.discard(worker)
        self._removed[worker] = self._clock()
        self.tidy()

    def tidy(self) -> None:
        """Count all requests. Add the numbers of workers that were removed a while ago to those of ``REMOVED``.

        So no counter falls when workers are removed.
        """
        self.settle()
        too_many, latest = len(self._removed) - _MAX_REMOVED, self._clock() - _REMOVED_S
        old = {
            worker
            for place, (worker, at) in enumerate(self._removed.items())
            if place < too_many or at < latest
        }
        if old:
            for worker in old:
                del self._removed[worker]
            self._merge_series(kind for kind in [*self._series] if kind.worker in old)
            for worker, code in [key for key in self.failed if key[0] in old]:
                self.failed[REMOVED, code] += self.failed.pop((worker, code))

    def _merge_series(self, kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            series = self._series.pop(kind)
            self.of(kind.method, kind.path, kind.status, REMOVED).add(series)
