"""Workers: their URLs, types, holds and states, and the requests in flight at each."""

from __future__ import annotations

import random
import re
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from router_core.errors import BadRequest
from slime_start.values import wrong_worker_url

__all__ = [
    "DRAINING", "JOINING", "Hold", "Worker", "WorkerChange", "WorkerState", "WorkerType", "auth_headers",
    "least_in_flight", "worker_url",
]  # fmt: skip

#: ``"regular"``, ``"passthrough"``, or a type of a plugin.
WorkerType = str
#: States in order of precedence: a worker with several holds shows the first of their states.
WorkerState = Literal["draining", "quarantined", "stale", "joining", "ready"]
WorkerChange = Literal["added", "removed", "quarantined", "stale", "readmitted", "draining"]

#: The owners of the core's holds.
JOINING, DRAINING = "joining", "draining"
_STATES: tuple[WorkerState, ...] = get_args(WorkerState)
#: A name of RFC 1123, or an IPv4 address. Underscores are allowed, since names of Docker Compose have them.
_HOST = re.compile(r"[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9])?")


def worker_url(text: str) -> str:
    """Return ``text``, a worker's base URL, in its one normal form ``http[s]://host[:port]``. Raises BadRequest."""
    wrong = BadRequest(wrong_worker_url(text))
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
        with suppress(OSError):  # 127.1 and 0x7f000001 are the same server as 127.0.0.1
            host = socket.inet_ntoa(socket.inet_aton(host))
    usual = port is None or port == (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{host}" if usual else f"{parts.scheme}://{host}:{port}"


class Hold(NamedTuple):
    """A reason why a worker gets no requests. ``state``: the state that it gives the worker; ``"ready"``: no change."""

    reason: str
    state: WorkerState


@dataclass(eq=False)
class Worker:
    """One inference server.

    ``in_flight`` counts the requests that hold a lease on it, from the choice to the last byte.
    ``holds``: reasons why it gets no requests, by owner, see :meth:`WorkerPool.hold`. A worker without holds gets
    requests. The holds determine its ``state``:

    =============== ==========================================================================================
    ``draining``    gets no new requests, and is removed when those in flight have ended
    ``quarantined`` does not answer as it should
    ``stale``       its weights are not the fleet's, or it failed a control call
    ``joining``     is registered, and has not answered yet
    ``ready``       none of these; a hold may still keep requests from it, as an open circuit breaker does
    =============== ==========================================================================================

    ``weight_version``: the version that the router assumes. ``said_version``: the version that the worker reported
    last. An engine that gets no version with an update keeps reporting the previous version.

    ``facts``: data of plugins about the worker. Each key belongs to one plugin.

    ``worker_type`` ``passthrough``: the router only proxies to it, in any protocol. Either all workers are so, or none.

    A plugin may give a worker several ``targets``, see :meth:`WorkerPool.divide`: then a request goes to one of them. A
    target is a Worker too, with its own ``id``, ``name``, ``facts`` and requests in flight; its ``server`` has
    everything else. Any other worker is its own ``server``.
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
    removal: str | None = field(default=None, repr=False)  # the reason why it was removed, for the log
    name: str = ""  # by default the URL
    targets: tuple[Worker, ...] = field(default=(), repr=False)
    server: Worker = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.server = self
        self.name = self.name or self.url

    @property
    def passthrough(self) -> bool:
        """True when the router only proxies to the worker (for a target: to its server)."""
        return self.server.worker_type == "passthrough"

    @property
    def kind(self) -> WorkerType:
        """The type for choosing a worker: a passthrough worker counts as regular, since it takes whole requests."""
        return "regular" if self.passthrough else self.worker_type

    @property
    def load(self) -> int:
        """Requests in flight, including the requests of its targets."""
        return self.in_flight + sum(target.in_flight for target in self.targets)

    @property
    def is_healthy(self) -> bool:
        """True when the worker has no hold, so it gets requests; a target has its server's holds."""
        return not self.server.holds

    @property
    def state(self) -> WorkerState:
        """The state of the hold that takes precedence, or ``ready`` without holds. A target has its server's state."""
        hold = self._main_hold
        return "ready" if hold is None else hold.state

    @property
    def reason(self) -> str | None:
        """The reason why the worker gets no requests, or None."""
        hold = self._main_hold
        return None if hold is None else hold.reason

    @property
    def _main_hold(self) -> Hold | None:
        latest_first = reversed(self.server.holds.values())
        return min(latest_first, key=lambda hold: _STATES.index(hold.state), default=None)

    @property
    def in_use(self) -> bool:
        """True when each hold of the worker, if any, has the state ``joining`` or ``ready`` (a circuit breaker's)."""
        return all(hold.state in ("joining", "ready") for hold in self.server.holds.values())

    @property
    def choices(self) -> tuple[Worker, ...]:
        """The worker's targets, or without targets the worker itself."""
        return self.targets or (self,)

    def standing(self) -> str:
        """Return the worker's URL, type and state, and the reason why it gets no requests, in one line."""
        server, hold = self.server, self._main_hold
        standing = (
            "ready" if hold is None else f"{'held' if hold.state == 'ready' else hold.state}: {hold.reason}"
        )
        return f"{server.url} {server.worker_type} {standing}"


def least_in_flight(workers: Iterable[Worker]) -> Worker:
    """Return the worker with the fewest requests in flight, ties broken at random. ``workers`` must not be empty."""
    best: list[Worker] = []
    fewest = -1
    for worker in workers:
        if worker.in_flight < fewest or not best:
            best, fewest = [worker], worker.in_flight
        elif worker.in_flight == fewest:
            best.append(worker)
    return best[0] if len(best) == 1 else random.choice(best)


def auth_headers(worker: Worker) -> dict[str, str]:
    """Return the headers that authenticate the router to ``worker``: its API key, if it has one."""
    return {} if worker.api_key is None else {"authorization": f"Bearer {worker.api_key}"}
