"""A worker under health checks."""

from __future__ import annotations

import anyio

from router_core import Worker
from router_core.router import Router
from slime_health.agreement import missed_control_call
from slime_health.judge import Judge

__all__ = ["JUDGED", "UNCHECKED", "WEIGHTS", "Watch", "standing"]

#: States that this plugin may change. The core owns the others.
JUDGED = ("ready", "quarantined", "stale")
#: Owner of the hold of a worker that has failed, and has not answered the question for its version since.
UNCHECKED = "unchecked weights"
#: Owner of the hold of a worker whose reported weights are not the fleet's.
WEIGHTS = "weights"


class Watch:
    """State of the health check of one worker.

    ``woken``: there is news, so the next look is due soon. ``doubted``: the source of a hint that the worker has
    another version, until a question is sent. ``is_asked``: a task sends that question. ``claim``: the version in the
    worker's last answer to a client that did not name the version known then. ``changed_at``: when the reported version
    last changed without a failure in between.
    """

    __slots__ = (
        "_expected",
        "changed_at",
        "claim",
        "doubted",
        "is_asked",
        "judge",
        "scope",
        "woken",
        "worker",
    )

    def __init__(self, worker: Worker, judge: Judge) -> None:
        self.worker = worker
        self.judge = judge
        self.scope = anyio.CancelScope()
        self.woken = anyio.Event()
        self.doubted: str | None = None
        self.is_asked = False
        self.claim: str | None = None
        self.changed_at = 0.0
        self._expected: tuple[str | None, bytes] = (None, b"?")

    @property
    def expected(self) -> bytes:
        """The worker's version, as it stands in the JSON of an answer."""
        said = self.worker.said_version
        if self._expected[0] != said and said is not None:
            self._expected = said, b'"%b"' % said.encode()
        return self._expected[1]


def standing(router: Router, worker: Worker) -> tuple[object, ...]:
    """Return the state of ``worker``. When this state changes, earlier answers about the worker are obsolete."""
    is_unchecked = UNCHECKED in worker.holds
    return (
        worker.state,
        is_unchecked,
        missed_control_call(worker),
        worker.weight_version,
        router.weights.current,
    )
