"""The workers and who may be used: counts, states, and which session belongs where."""

from __future__ import annotations

import random
import re
import socket
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from router_core.errors import BadRequest, MixedWorkers, NoWorker, WorkerNotFound

__all__ = [
    "DRAINING",
    "JOINING",
    "Hold",
    "Worker",
    "WorkerChange",
    "WorkerPool",
    "WorkerState",
    "WorkerType",
    "auth_headers",
    "least_in_flight",
    "worker_url",
]

WorkerType = Literal["regular", "prefill", "decode", "passthrough"]
#: All but the last are those of holds; of several holds the first of these counts.
WorkerState = Literal["draining", "quarantined", "stale", "joining", "ready"]
WorkerChange = Literal["added", "removed", "quarantined", "stale", "readmitted", "draining"]

#: The core's own owners of holds.
JOINING, DRAINING = "joining", "draining"
_STATES: tuple[WorkerState, ...] = get_args(WorkerState)
_MAX_SESSIONS = 1 << 18
#: Workers that a message tells about.
_MAX_TOLD = 20
#: A name of RFC 1123, underscores allowed as Docker and Kubernetes use them; or an IPv4 address.
_HOST = re.compile(r"[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9])?")


def worker_url(text: str) -> str:
    """``text`` as a worker's base URL, ``http[s]://host[:port]``, always spelt the same way. Raises BadRequest."""
    wrong = BadRequest(f"wanted a worker URL such as http://10.0.0.7:30001, got {text[:200]!r}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise wrong from None
    host = parts.hostname or ""
    if (
        parts.scheme not in ("http", "https")
        or "@" in parts.netloc
        or parts.netloc.endswith(":")
        or port == 0
    ):
        raise wrong
    if parts.path.strip("/") or parts.query or parts.fragment or any(char <= " " for char in text):
        raise wrong
    if "[" in parts.netloc:
        try:
            address = IPv6Address(host)
        except ValueError:
            raise wrong from None
        host = str(address.ipv4_mapped or f"[{address}]")
    elif not _HOST.fullmatch(host):
        raise wrong
    else:
        with suppress(OSError):  # one server is one worker, whether it is 127.0.0.1, 127.1 or 0x7f000001
            host = socket.inet_ntoa(socket.inet_aton(host))
    usual = port is None or port == (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{host}" if usual else f"{parts.scheme}://{host}:{port}"


class Hold(NamedTuple):
    """Reason that a worker gets no requests. ``state``: its state then; ``"ready"``: as without the hold."""

    reason: str
    state: WorkerState


@dataclass(eq=False, slots=True)
class Worker:
    """One inference server.

    ``in_flight`` counts the requests that hold a lease on it, from the choice to the last byte.
    ``holds``: why it gets no requests, by owner, see :meth:`WorkerPool.hold`; one without holds gets requests. They
    make its ``state``:

    =============== ===========================================================================
    ``draining``    gets nothing new, and leaves when what it has is done
    ``quarantined`` does not answer as it should
    ``stale``       its weights are not the fleet's, or it failed a control call
    ``joining``     registered, has not answered yet
    ``ready``       none of these; it may be held all the same, as by an open circuit breaker
    =============== ===========================================================================

    ``weight_version``: the weights that it is taken to have. ``said_version``: what it said of them last, by itself; an
    engine that is never told the names of its updates goes on saying the same.

    ``facts``: what plugins know of it, by names of their own; each name belongs to one plugin.

    ``worker_type`` ``passthrough``: it is only proxied to, whatever protocol it speaks. Then all workers are.

    A server with data-parallel ranks is one worker, and each of its ``ranks`` a choice of its own: a Worker that counts
    what is in flight there, and whose ``server`` has all else. Of any other the ``server`` is the worker itself.
    """

    url: str
    worker_type: WorkerType = "regular"
    facts: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    weight_version: str | None = None
    api_key: str | None = field(default=None, repr=False)
    holds: dict[str, Hold] = field(default_factory=dict)
    in_flight: int = 0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    said_version: str | None = None
    rank: int | None = None
    ranks: tuple[Worker, ...] = field(default=(), repr=False)
    server: Worker = field(default=None, repr=False)  # type: ignore[assignment]  # itself, unless it is a rank

    def __post_init__(self) -> None:
        if self.rank is None:
            self.server = self

    @property
    def name(self) -> str:
        """Its URL; of a rank ``url@rank``."""
        return self.url if self.rank is None else f"{self.url}@{self.rank}"

    @property
    def passthrough(self) -> bool:
        """It is only proxied to; of a rank, its server is."""
        return self.server.worker_type == "passthrough"

    @property
    def kind(self) -> WorkerType:
        """The type as which it is chosen: one that is only proxied to takes whole requests, as a regular one does."""
        return "regular" if self.passthrough else self.worker_type

    @property
    def load(self) -> int:
        """Requests in flight, those of its ranks included."""
        return self.in_flight + sum(rank.in_flight for rank in self.ranks)

    @property
    def is_healthy(self) -> bool:
        """Nobody holds it: it gets requests."""
        return not self.server.holds

    @property
    def state(self) -> WorkerState:
        """Of its holds the one that counts most; of a rank, its server's."""
        hold = self._main_hold
        return "ready" if hold is None else hold.state

    @property
    def reason(self) -> str | None:
        """The reason why the worker gets no requests, or None."""
        hold = self._main_hold
        return None if hold is None else hold.reason

    @property
    def _main_hold(self) -> Hold | None:
        return min(reversed(self.server.holds.values()), key=_weight, default=None)  # of equals the latest

    @property
    def in_use(self) -> bool:
        """It gets requests, or may get some without anything more being done to it: it is joining, or failed some."""
        return all(hold.state in ("joining", "ready") for hold in self.server.holds.values())

    @property
    def choices(self) -> tuple[Worker, ...]:
        """The targets that a request can be given: the worker's ranks, else the worker itself."""
        return self.ranks or (self,)

    def split(self, size: int) -> None:
        """It has ``size`` data-parallel ranks; with one it is a single choice. Those that it has stay."""
        if len(self.choices) != size:
            known = self.ranks[: size if size > 1 else 0]  # with what is in flight there
            more = range(len(known), size if size > 1 else 0)
            new = (Worker(self.url, id=f"{self.id}@{rank}", rank=rank, server=self) for rank in more)
            self.ranks = (*known, *new)

    def standing(self) -> str:
        """Its URL and state, and why it gets no requests, in one line."""
        server, hold = self.server, self._main_hold
        standing = (
            "ready" if hold is None else f"{'held' if hold.state == 'ready' else hold.state}: {hold.reason}"
        )
        return f"{server.url} {server.worker_type} {standing}"


def _weight(hold: Hold) -> int:
    return _STATES.index(hold.state)


def least_in_flight(workers: Iterable[Worker]) -> Worker:
    """The worker with the fewest requests in flight, ties broken at random. ``workers`` must not be empty."""
    best: list[Worker] = []
    fewest = -1
    for worker in workers:
        if worker.in_flight < fewest or not best:
            best, fewest = [worker], worker.in_flight
        elif worker.in_flight == fewest:
            best.append(worker)
    return best[0] if len(best) == 1 else random.choice(best)


def auth_headers(worker: Worker) -> dict[str, str]:
    """Return the headers that a request to ``worker`` must carry besides: the API key of its registration, if any."""
    return {} if worker.api_key is None else {"authorization": f"Bearer {worker.api_key}"}


class WorkerPool:
    """All registered workers; a server with data-parallel ranks is one.

    ``kinds``: of each of these types there must be one for a request to be answered.
    ``keeps_sessions``: a session stays with its worker; False when a policy is to be asked for each of its requests.
    Changed only by functions without ``await``: one event loop needs no lock, and a choice and its lease
    are one step.
    """

    def __init__(self, on_change: Callable[[Worker, WorkerChange], None]) -> None:
        self._workers: dict[str, Worker] = {}
        self._routable: tuple[Worker, ...] = ()
        self._usable: dict[WorkerType, tuple[Worker, ...]] = {}
        self.kinds: tuple[WorkerType, ...] = ("regular",)
        self.keeps_sessions = True
        self._sessions: OrderedDict[str, Worker] = OrderedDict()
        self._set_aside: set[Worker] = set()  # of which plugins were told
        self._on_change = on_change

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def __contains__(self, worker: Worker) -> bool:
        return self._workers.get(worker.url) is worker.server

    def find(self, id_or_url: str) -> Worker:
        """The worker with that id or URL, or the rank with that id or name. Raises WorkerNotFound."""
        worker = self._workers.get(id_or_url)
        if worker is not None:
            return worker
        for server in self._workers.values():
            for worker in (server, *server.ranks):
                if id_or_url in (worker.id, worker.name):
                    return worker
        known = ", ".join(self._workers) or "none"
        raise WorkerNotFound(f"no worker {id_or_url!r}; registered: {known}")

    def add(self, worker: Worker) -> Worker:
        """Register ``worker``. One that is known under its URL stays, and starts afresh; a ready one goes on.

        It keeps the facts that ``worker`` has not. Raises MixedWorkers.
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
        # A ready one keeps its sessions.
        worker.holds = {} if is_ready else {JOINING: Hold("it has not answered yet", "joining")}
        self._set_aside.discard(worker)
        self._recount()
        self._on_change(worker, "added")
        return worker

    @property
    def passthrough(self) -> bool:
        """The workers are only proxied to: no plugin takes or changes a request. O(1)."""
        first = next(iter(self._workers.values()), None)  # all are alike
        return first is not None and first.passthrough

    def _expect_alike(self, worker: Worker) -> None:
        wanted = worker.passthrough
        others = [other for other in self._workers.values() if other.url != worker.url]
        if wanted and self.kinds != ("regular",):
            raise MixedWorkers(
                f"{worker.url}: a router of {' and '.join(self.kinds)} workers has no passthrough workers"
            )
        if any(other.passthrough != wanted for other in others):
            raise MixedWorkers(
                f"{worker.url} would be a {worker.worker_type} worker beside {others[0].worker_type} workers:"
                " passthrough workers and others need a router of their own each"
            )

    def remove(self, worker: Worker) -> None:
        """Forget ``worker``, with all its ranks. What it has in flight goes on, and its count stays right."""
        worker = worker.server
        if worker in self:
            del self._workers[worker.url]
            self._set_aside.discard(worker)
            self._recount()
            self._on_change(worker, "removed")

    def hold(self, worker: Worker, owner: str, reason: str, state: WorkerState = "ready") -> None:
        """No new requests for ``worker`` until ``owner`` releases it; those in flight go on.

        Each owner has one hold of a worker, and releases only its own: ``"joining"`` and ``"draining"`` are the core's,
        ``"health"``, ``"weights"`` and ``"control"`` those of who knows about these. ``state``: what the worker is
        then; by default it stays what it is. When a worker is registered again, all let go.
        """
        others = {name: hold for name, hold in worker.server.holds.items() if name != owner}
        self._change(worker, others | {owner: Hold(reason, state)})

    def release(self, worker: Worker, *owners: str) -> None:
        """``owners`` hold ``worker`` no more, if they did. It gets requests when nobody does."""
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

    def split(self, worker: Worker, size: int) -> None:
        """``worker`` has told how many data-parallel ranks it has."""
        worker.split(size)
        self._recount()

    def _recount(self) -> None:
        free = [worker for worker in self._workers.values() if not worker.holds]
        for kind in self.kinds:
            ready = [worker for worker in free if worker.kind == kind]
            self._usable[kind] = tuple(choice for worker in ready for choice in worker.choices)
        each = [self._usable[kind] for kind in self.kinds]
        self._routable = tuple(chain.from_iterable(each)) if all(each) else ()

    @property
    def healthy(self) -> int:
        """The number of workers that are ready and may be used."""
        return sum(worker.is_healthy for worker in self._workers.values())

    def routable(self) -> tuple[Worker, ...]:
        """The workers, and ranks of workers, that a request may go to now. Raises NoWorker when one is missing."""
        if not self._routable:
            missing = next(kind for kind in self.kinds if not self._usable.get(kind))
            kind = "" if missing == "regular" else f"{missing} "
            raise NoWorker(f"no {kind}worker can take requests (registered: {self.standings()})")
        return self._routable

    def usable(self, kind: WorkerType) -> tuple[Worker, ...]:
        """Those of :meth:`routable` that are of this kind; none is missing. Raises NoWorker."""
        self.routable()
        return self._usable[kind]

    def standings(self) -> str:
        """Return each worker's reason for getting no requests; of a large fleet, the first ones'."""
        told = [worker.standing() for worker in islice(self, _MAX_TOLD)]
        more = len(self) - len(told)
        return "; ".join([*told, f"and {more} more"] if more else told) or "none"

    def of_session(self, session: str) -> Worker | None:
        """The worker that ``session`` went to before, if it can be used now."""
        worker = self._sessions.get(session)
        if worker is None:
            return None
        self._sessions.move_to_end(session)
        return worker if worker in self._routable else None

    def bind(self, session: str, worker: Worker) -> None:
        """``session`` keeps ``worker`` from now on. The least recently used sessions are forgotten past 262,144."""
        if not self.keeps_sessions:
            return
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
