"""Calls that workers missed, and must make up for before they get requests again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from router_core import Worker
from router_core.router import Router

__all__ = ["OWNER", "WEIGHTS", "MissedCall", "MissedCalls"]

logger = logging.getLogger(__name__)

#: Owner of the hold of a worker that missed a call.
OWNER = "control"
#: Owner of the hold of a worker that has no missed call, or none any more, but may lack the fleet's weights.
WEIGHTS = "control weights"


@dataclass(frozen=True, slots=True)
class MissedCall:
    """A missed call. ``number``: the call's number, or 0 if the call was missed before this process began.

    ``version``: used only with the number 0. It is the fleet's version at the time when the worker's hold was first
    looked at: the missed call may be the update to that version.
    """

    number: int
    version: str | None = None


class MissedCalls:
    """The last missed call of each worker and kind.

    A worker with a missed call gets no requests, even if it reports the fleet's version. No change of this state has an
    ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._missed: dict[Worker, dict[str, MissedCall]] = {}

    def of(self, worker: Worker) -> Mapping[str, MissedCall]:
        """Return what ``worker`` missed, by kind.

        If an earlier process held the worker for a missed call, the worker is assumed to have missed weights.
        """
        if OWNER in worker.holds and worker not in self._missed:
            self._missed[worker] = {"weights": MissedCall(0, self._router.weights.current)}
        return self._missed.get(worker, {})

    def weights_of(self, worker: Worker) -> MissedCall | None:
        """Return the last call about weights that ``worker`` missed, or None."""
        return self.of(worker).get("weights")

    def reason(self, worker: Worker) -> str | None:
        """Return the reason why ``worker`` is held for a missed call; else the reason why it is stale, or None."""
        stale = [hold for hold in worker.holds.values() if hold.state == "stale"]
        hold = worker.holds.get(OWNER) or (stale[-1] if stale else None)
        return None if hold is None else hold.reason

    def add(self, worker: Worker, kind: str, number: int, reason: str) -> None:
        """Note that ``worker`` missed the call ``number`` of ``kind``. This replaces an earlier note of that kind."""
        if worker not in self._router.pool:
            return
        self.of(worker)
        self._missed.setdefault(worker, {})[kind] = MissedCall(number)
        self._hold(worker, OWNER, reason)
        if kind == "weights":
            self._router.pool.set_version(worker, None)

    def clear(self, worker: Worker, kind: str) -> None:
        """Note that ``worker`` has made up for the missed call of ``kind``."""
        if kind in self.of(worker):
            del self._missed[worker][kind]
            if not self._missed[worker]:
                self.forget(worker)
                pool, hold = self._router.pool, worker.holds.get(OWNER)
                if hold is not None:
                    pool.hold(worker, WEIGHTS, hold.reason, "stale")  # until it is readmitted
                    pool.release(worker, OWNER)

    def forget(self, worker: Worker) -> None:
        """Forget all that ``worker`` missed."""
        self._missed.pop(worker, None)

    def set_aside(self, worker: Worker, reason: str) -> None:
        """Keep new requests from ``worker`` until it has the fleet's weights."""
        self._hold(worker, WEIGHTS, reason)

    def _hold(self, worker: Worker, owner: str, reason: str) -> None:
        if worker in self._router.pool:
            logger.warning("worker %s gets no new requests: %s", worker.url, reason)
            self._router.pool.hold(worker, owner, reason, "stale")

    def readmit(self, worker: Worker) -> None:
        """Let ``worker`` get requests again if it missed no other call and has the fleet's version.

        Any version will do while the fleet has none.
        """
        if OWNER not in worker.holds and self._router.weights.current in (None, worker.weight_version):
            self._router.hooks.weights_confirmed(worker)

    def weights_confirmed(self, worker: Worker) -> None:
        """Release ``worker`` unless it has missed a call."""
        if OWNER not in worker.holds:
            self._router.pool.release(worker, WEIGHTS)
