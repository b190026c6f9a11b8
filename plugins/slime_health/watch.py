"""A worker that is attended."""

from __future__ import annotations

import anyio

from router_core import Worker
from router_core.router import Router
from slime_health.agreement import is_torn
from slime_health.judge import Judge

__all__ = ["JUDGED", "Watch", "standing"]

#: States that this plugin may change: not those of workers that are awaited, nor of those that leave.
JUDGED = ("ready", "quarantined", "stale")


class Watch:
    """State of the health check of one worker.

    ``woken``: there is news, so the next look is due soon. ``doubted``: it is to be asked for its weights, because of
    what this source said; ``is_asked`` while somebody does. ``claim``: what its last answer named, if that was news.
    ``changed_at``: when it last said another version than before.
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
        """Its version as an answer names it, in JSON."""
        said = self.worker.said_version
        if self._expected[0] != said and said is not None:
            self._expected = said, b'"%b"' % said.encode()
        return self._expected[1]


def standing(router: Router, worker: Worker) -> tuple[object, ...]:
    """State of ``worker`` that makes an answer about it obsolete when it changes."""
    return worker.state, is_torn(worker), worker.weight_version, router.weights.current
