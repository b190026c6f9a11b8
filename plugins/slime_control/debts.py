"""Calls that workers failed, and have to make good for before they get requests again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from router_core import Worker
from router_core.router import Router

__all__ = ["OWNER", "Debt", "Debts"]

logger = logging.getLogger(__name__)

#: Of the holds of workers that owe something.
OWNER = "control"


@dataclass(frozen=True, slots=True)
class Debt:
    """The number of the call that was failed.

    ``version``, of what was failed before this process began: the fleet's then. An update to it may be the one that
    was failed.
    """

    call: int
    version: str | None = None


class Debts:
    """By worker and kind. While a worker owes anything it gets no requests, and what it says of itself is no proof.

    Changed only by functions without ``await``: one event loop needs no lock.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._owed: dict[Worker, dict[str, Debt]] = {}

    def of(self, worker: Worker) -> Mapping[str, Debt]:
        """Return the calls that ``worker`` owes, by kind.

        One that failed a call before this process began may owe anything: the weights, to be sure.
        """
        if OWNER in worker.holds and worker not in self._owed:
            self._owed[worker] = {"weights": Debt(0, self._router.weights.current)}
        return self._owed.get(worker, {})

    def owe(self, worker: Worker, kind: str, call: int, reason: str) -> None:
        """``worker`` has failed ``call``, for this ``reason``; what it failed before that matters no more."""
        if worker not in self._router.pool:
            return
        self.of(worker)
        self._owed.setdefault(worker, {})[kind] = Debt(call)
        self._hold(worker, OWNER, reason)
        if kind == "weights":
            worker.weight_version = None

    def pay(self, worker: Worker, kind: str) -> None:
        """``worker`` has made good for ``kind``."""
        if kind in self.of(worker):
            del self._owed[worker][kind]
            if not self._owed[worker]:
                self.forget(worker)
                pool, hold = self._router.pool, worker.holds.get(OWNER)
                if hold is not None:
                    pool.hold(worker, "weights", hold.reason, "stale")  # until it is taken back
                    pool.release(worker, OWNER)

    def forget(self, worker: Worker) -> None:
        """``worker`` begins afresh, or is there no more."""
        self._owed.pop(worker, None)

    def leave_behind(self, worker: Worker, reason: str) -> None:
        """No new requests for ``worker``, until it has the fleet's weights."""
        self._hold(worker, "weights", reason)

    def _hold(self, worker: Worker, owner: str, reason: str) -> None:
        if worker in self._router.pool:
            logger.warning("worker %s gets no new requests: %s", worker.url, reason)
            self._router.pool.hold(worker, owner, reason, "stale")

    def take_back(self, worker: Worker) -> None:
        """``worker`` has caught up, unless it owes something else, or has other weights than the fleet."""
        if OWNER not in worker.holds and self._router.weights.current in (None, worker.weight_version):
            self._router.pool.release(worker, "weights")
