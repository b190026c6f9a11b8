"""The pool of all registered workers: the eligible workers, and the worker of each session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from router_core.errors import MixedWorkers, NoWorker, WorkerNotFound
from router_core.workers import JOINING, Hold, Worker, WorkerChange, WorkerState, WorkerType

__all__ = ["WorkerPool"]

_MAX_SESSIONS = 1 << 18
#: An error message lists at most this many workers, and counts the rest.
_MAX_TOLD = 20


class WorkerPool:
    """All registered workers.

    ``keeps_sessions``: True if a session stays with its worker, False if a policy chooses for each of its requests.
    No change of the pool has an ``await`` in the middle, so on one event loop the pool needs no lock. Nor is there an
    ``await`` between the choice of a worker and its lease.
    """

    def __init__(self, on_change: Callable[[Worker, WorkerChange], None]) -> None:
        self._workers: dict[str, Worker] = {}
        #: True when the workers are passthrough workers, so plugins leave requests and replies as they are.
        self.passthrough = False
        self._routable: tuple[Worker, ...] = ()
        #: For each type of worker that requests need: the workers and targets of that type that may get requests now.
        self._usable: dict[WorkerType, tuple[Worker, ...]] = {"regular": ()}
        self.keeps_sessions = True
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        self._set_aside: set[Worker] = set()  # plugins were told that these get no requests
        self._on_change = on_change

    def require(self, *kinds: WorkerType) -> None:
        """Let each request need a worker of each of ``kinds``, instead of a regular one. Call this in ``setup``."""
        self._usable = dict.fromkeys(kinds, ())

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker: Worker) -> bool:
        return self._workers.get(worker.url) is worker.server

    def find(self, id_or_url: str) -> Worker:
        """Return the worker with that id or URL, or the target with that id or name. Raises WorkerNotFound."""
        worker = self._workers.get(id_or_url)
        if worker is not None:
            return worker
        for server in self._workers.values():
            for worker in (server, *server.targets):
                if id_or_url in (worker.id, worker.name):
                    return worker
        known = ", ".join(self._workers) or "none"
        raise WorkerNotFound(f"no worker {id_or_url!r}; registered: {known}")

    def add(self, worker: Worker) -> Worker:
        """Register ``worker``, or update the worker that is registered under its URL. Returns the registered worker.

        An updated worker keeps facts that ``worker`` lacks, and joins again unless it is ready. Raises MixedWorkers.
        """
        self._expect_alike(worker)
        known = self._workers.get(worker.url)
        is_ready = False
        if known is None:
            self._workers[worker.url] = worker
        else:
            is_ready = known.state == "ready"
            known.worker_type = worker.worker_type
            known.facts |= worker.facts
            known.labels = worker.labels
            known.api_key = worker.api_key or known.api_key
            worker = known
        # A ready worker stays eligible, and so keeps its sessions.
        worker.holds = {} if is_ready else {JOINING: Hold("it has not answered yet", "joining")}
        self._set_aside.discard(worker)
        self._recount()
        self._on_change(worker, "added")
        return worker

    def _expect_alike(self, worker: Worker) -> None:
        wanted = worker.passthrough
        others = [other for other in self._workers.values() if other.url != worker.url]
        if wanted and self._usable.keys() != {"regular"}:
            raise MixedWorkers(
                f"{worker.url}: a router of {' and '.join(self._usable)} workers cannot have passthrough workers"
            )
        if any(other.passthrough != wanted for other in others):
            raise MixedWorkers(
                f"{worker.url} would be a {worker.worker_type} worker beside {others[0].worker_type} workers:"
                " passthrough workers and other workers each need a router of their own"
            )

    def remove(self, worker: Worker, reason: str | None = None) -> None:
        """Remove ``worker`` with its targets; log ``reason``. The requests in flight go on, and stay counted."""
        worker = worker.server
        if worker in self:
            del self._workers[worker.url]
            worker.removal = reason
            self._set_aside.discard(worker)
            self._recount()
            self._on_change(worker, "removed")

    def hold(self, worker: Worker, owner: str, reason: str, state: WorkerState = "ready") -> None:
        """Send no new requests to ``worker``, at least until ``owner`` releases it; requests in flight go on.

        Each owner has at most one hold of a worker, and releases only that hold. The owners ``"joining"`` and
        ``"draining"`` belong to the core, all others to plugins. ``state``: see :class:`Hold`.
        Registering the worker again removes all holds.
        """
        others = {name: hold for name, hold in worker.server.holds.items() if name != owner}
        self._change(worker, others | {owner: Hold(reason, state)})

    def release(self, worker: Worker, *owners: str) -> None:
        """Remove the holds of ``owners`` on ``worker``, if any. The worker gets requests when no hold is left."""
        self._change(worker, {name: hold for name, hold in worker.server.holds.items() if name not in owners})

    def _change(self, worker: Worker, holds: dict[str, Hold]) -> None:
        worker = worker.server
        if worker not in self or holds == worker.holds:
            return
        before, worker.holds = worker.state, holds
        self._recount()
        after = worker.state
        if after == before or after == "joining":
            return
        if after != "ready":
            self._set_aside.add(worker)
            self._on_change(worker, after)
        elif worker in self._set_aside:
            self._set_aside.discard(worker)
            self._on_change(worker, "readmitted")

    def set_version(self, worker: Worker, version: str | None) -> None:
        """Set the weight version assumed for ``worker``; None: unknown. No other code changes that version."""
        worker.weight_version = version

    def divide(self, worker: Worker, targets: Sequence[Worker]) -> None:
        """Let each request for ``worker`` go to one of ``targets``; without targets to the worker itself."""
        for target in targets:
            target.server = worker
        worker.targets = tuple(targets)
        self._recount()

    def _recount(self) -> None:
        first = next(iter(self._workers.values()), None)  # all workers are passthrough, or none is
        self.passthrough = first is not None and first.passthrough
        free = [worker for worker in self._workers.values() if not worker.holds]
        for kind in self._usable:
            ready = [worker for worker in free if worker.kind == kind]
            self._usable[kind] = tuple(choice for worker in ready for choice in worker.choices)
        each = self._usable.values()
        self._routable = tuple(chain.from_iterable(each)) if all(each) else ()

    @property
    def healthy(self) -> int:
        """The number of workers without a hold."""
        return sum(worker.is_healthy for worker in self._workers.values())

    @property
    def missing(self) -> str | None:
        """The first worker type that requests need and no usable worker has, for messages; None: all are there."""
        for kind, workers in self._usable.items():
            if not workers:
                return "worker" if kind == "regular" else f"{kind} worker"
        return None

    def routable(self) -> tuple[Worker, ...]:
        """Return the workers and targets that a request may go to now. Raises NoWorker if a needed type has none."""
        if not self._routable:
            raise NoWorker(f"no {self.missing} can take requests (registered: {self.standings()})")
        return self._routable

    def usable(self, kind: WorkerType) -> tuple[Worker, ...]:
        """Return the workers of :meth:`routable` of type ``kind``. Raises NoWorker as :meth:`routable` does."""
        self.routable()
        return self._usable[kind]

    def standings(self) -> str:
        """Return the first 20 workers in one line, each with its type, state and reason for getting no requests."""
        told = [worker.standing() for worker in islice(self, _MAX_TOLD)]
        more = len(self) - len(told)
        return (
            "; ".join([*told, f"and {more} more"] if more else told)
            or "none; add one by POST /add_worker?url=http://HOST:PORT"
        )

    def of_session(self, session: str) -> Worker | None:
        """Return the worker of ``session``, or None if the session has no worker that can be used now."""
        worker = self._sessions.get(session)
        if worker is None:
            return None
        self._sessions.move_to_end(session)
        return worker if worker in self._routable else None

    def bind(self, session: str, worker: Worker) -> None:
        """Let ``session`` keep ``worker`` if ``keeps_sessions``. Only the 262,144 sessions used last are remembered."""
        if not self.keeps_sessions:
            return
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
