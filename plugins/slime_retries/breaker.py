"""A circuit breaker: when to stop asking a worker, and when to try it again. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from router_core.flags import flag

__all__ = ["Breaker", "State", "Thresholds"]

State = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds at which a circuit breaker opens and closes again; times in seconds."""

    failures: int = flag(
        "--cb-failure-threshold", default=10, at_least=1, metavar="N",
        help="failures in a row that open a worker's circuit breaker",
    )  # fmt: skip
    successes: int = flag(
        "--cb-success-threshold", default=3, at_least=1, metavar="N",
        help="successes in a row that close a half-open circuit breaker",
    )  # fmt: skip
    timeout_s: float = flag(
        "--cb-timeout-duration-secs", default=60.0, above=0, metavar="S",
        help="how long a circuit breaker stays open before the worker is tried again (default: %(default)g)",
    )  # fmt: skip
    window_s: float = flag(
        "--cb-window-duration-secs", default=120.0, above=0, metavar="S",
        help="time within which the failures of --cb-failure-threshold must happen (default: %(default)g)",
    )  # fmt: skip
    disabled: bool = flag("--disable-circuit-breaker", default=False, help="no circuit breakers")


class Breaker:
    """The breaker of one worker.

    ::

        closed ── failures in a row ──▶ open ── wait_over() ──▶ half-open ── successes in a row ──▶ closed
                                          ◀────── a failure ────────┘

    A half-open breaker lets one attempt through at a time, the probe. It counts only the probe: other attempts may have
    begun earlier. An attempt is any object, compared by identity. No method has an ``await``, so on one event loop the
    breaker needs no lock. The owner calls :meth:`wait_over`.
    """

    __slots__ = ("_failures", "_now", "_probe", "_successes", "_thresholds", "state")

    def __init__(self, thresholds: Thresholds, now: Callable[[], float]) -> None:
        self.state: State = "closed"
        self._thresholds = thresholds
        self._now = now
        self._failures: deque[float] = deque(maxlen=thresholds.failures)
        self._probe: object = None
        self._successes = 0

    @property
    def admits(self) -> bool:
        """True when the worker may be sent a request now."""
        return self.state == "closed" or (self.state == "half-open" and self._probe is None)

    @property
    def untroubled(self) -> bool:
        """True when there is no failure to remember."""
        return self.state == "closed" and not self._failures

    def begin(self, attempt: object) -> None:
        """Note that ``attempt`` is sent. Needed only while half-open: the first attempt is the probe."""
        if self.state == "half-open" and self._probe is None:
            self._probe = attempt

    def failed(self, attempt: object) -> None:
        """Note that the worker failed ``attempt``."""
        if self.state == "closed":
            now = self._now()
            self._failures.append(now)
            full = len(self._failures) == self._thresholds.failures
            if full and now - self._failures[0] <= self._thresholds.window_s:
                self._open()
        elif self._is_probe(attempt):
            self._open()

    def succeeded(self, attempt: object) -> None:
        """Note that ``attempt`` was answered to its end, and not with a failure."""
        if self.state == "closed":
            self._failures.clear()
        elif self._is_probe(attempt):
            self._probe = None
            self._successes += 1
            if self._successes == self._thresholds.successes:
                self.state = "closed"

    def gave_up(self, attempt: object) -> None:
        """Note that ``attempt`` ended without a verdict. It neither opens nor closes the breaker."""
        if self._is_probe(attempt):
            self._probe = None

    def wait_over(self) -> None:
        """Note that ``timeout_s`` have passed since the breaker opened: it is half-open now."""
        if self.state == "open":
            self.state = "half-open"

    def _is_probe(self, attempt: object) -> bool:
        return self._probe is not None and self._probe is attempt

    def _open(self) -> None:
        self.state = "open"
        self._failures.clear()
        self._probe = None
        self._successes = 0
