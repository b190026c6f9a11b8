"""What workers failed, and have to make good for before they get requests again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from router_core import Worker
from router_core.router import Router

__all__ = ["Debt", "Debts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Debt:
    """The number of the call that was failed.

    ``version``, of what was failed before this process began: the fleet's then. An update to it may be the one that
    was failed.
    """

    call: int
    version: str | None = None


class Debts:
    """By worker and kind. A worker is ``torn`` while it owes anything.

    Changed only by functions without ``await``: one event loop needs no lock.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._owed: dict[Worker, dict[str, Debt]] = {}

    def of(self, worker: Worker) -> Mapping[str, Debt]:
        """What ``worker`` owes.

        One that was torn before this process began may owe anything: the weights, to be sure.
        """
        if worker.torn and worker not in self._owed:
            self._owed[worker] = {"weights": Debt(0, self._router.weights.current)}
        return self._owed.get(worker, {})

    def owe(self, worker: Worker, kind: str, call: int) -> None:
        """``worker`` has failed ``call``; what it failed before that matters no more."""
        if worker not in self._router.pool:
            return
        self.of(worker)
        self._owed.setdefault(worker, {})[kind] = Debt(call)
        worker.torn = True
        if kind == "weights":
            worker.weight_version = None

    def pay(self, worker: Worker, kind: str) -> None:
        """``worker`` has made good for ``kind``."""
        if kind in self.of(worker):
            del self._owed[worker][kind]
            if not self._owed[worker]:
                self.forget(worker)
                worker.torn = False

    def forget(self, worker: Worker) -> None:
        """``worker`` begins afresh, or is there no more."""
        self._owed.pop(worker, None)

    def leave_behind(self, worker: Worker, reason: str) -> None:
        """No new requests for ``worker``."""
        if worker in self._router.pool and worker.state != "draining":  # which gets nothing new as it is
            logger.warning("worker %s gets no new requests: %s", worker.url, reason)
            self._router.pool.stale(worker, reason)

    def take_back(self, worker: Worker) -> None:
        """``worker`` has caught up, unless it owes something else, or has other weights than the fleet."""
        fits = self._router.weights.current in (None, worker.weight_version)
        if worker.state == "stale" and not worker.torn and fits:
            self._router.pool.ready(worker)
