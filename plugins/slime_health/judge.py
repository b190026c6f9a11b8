"""The health state of one worker, from its probes and traffic. Without I/O; times are the event loop's."""

from __future__ import annotations

import errno
import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

from router_core import HTTPError
from router_core.errors import WorkerBroke, WorkerUnreachable

__all__ = ["AS_STARTED", "Fit", "Judge", "Severity", "Unwell", "fit", "severity"]

#: Severity of a failure. ``firm``: the connection was refused, or a probe got an error status; only a good probe clears
#: it. ``soft``: the answer broke; any later answer clears it. ``silent``: no answer came. It does not count if the
#: worker answered other traffic meanwhile; otherwise it counts as soft. ``none``: not the worker's fault.
Severity = Literal["firm", "soft", "silent", "none"]

#: ``same``: the fleet's version, or any version while the fleet has none. ``ahead``: a newer version, from an update
#: that is not announced yet. ``other``: another version, or none.
Fit = Literal["same", "ahead", "other"]

#: SGLang's version of weights that were never updated: it is ahead of no other version.
AS_STARTED = "default"
#: Errors of a router that lacks sockets, ports or memory: they say nothing about the worker.
_OUR_LACK = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


class Unwell(HTTPError):
    """An error status in a worker's answer to a probe."""


def severity(error: HTTPError) -> Severity:
    """Return the severity of ``error``, the failure of a request or a probe, as evidence against the worker."""
    if isinstance(error, Unwell):
        return "firm"
    if isinstance(error, WorkerBroke):
        return "soft"
    if isinstance(error, WorkerUnreachable):
        cause = error.__context__
        if isinstance(cause, ConnectionRefusedError):
            return "firm"  # no process listens; a full backlog would not answer
        if isinstance(cause, OSError) and cause.errno in _OUR_LACK:
            return "none"
    return "silent"


def fit(said: str | None, fleet: str | None, seen: Container[str]) -> Fit:
    """Compare the version that a worker ``said`` with the fleet's. ``seen``: the versions that the fleet has had."""
    if fleet is None or said == fleet:
        return "same"
    if said in (None, AS_STARTED) or said in seen:
        return "other"
    if _is_number(fleet):
        return "ahead" if _is_number(said) and int(said) > int(fleet) else "other"
    return "ahead"


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit()


@dataclass(slots=True)
class Judge:
    """Counts failures and good probes in a row. The worker is trusted at first.

    ``verified``: the worker's weights were checked after it last failed or was set aside. Until such a check, it may be
    another process.
    ``may_be_another``: the worker has failed, and has not answered the question for its version since. Another server
    may have its address, so another version in the next answer is no sign of an update.
    ``vouched_at``: a worker's weights count as the fleet's when the worker registers, and when the fleet moves to other
    weights while the worker is ready, unless this move was only announced. ``vouched_at`` is the number of the fleet's
    moves up to then. It is None if the worker has since failed, or named another version.
    """

    failure_threshold: int
    success_threshold: int
    verified: bool = True
    vouched_at: int | None = None
    may_be_another: bool = False
    successes: int = field(init=False)
    _firm: int = 0
    _soft: int = 0
    _failed_at: float = -math.inf

    def __post_init__(self) -> None:
        self.successes = self.success_threshold

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._firm + self._soft

    @property
    def undecided(self) -> bool:
        """True while a verdict is near, so that the next probe should come soon."""
        return 0 < self.failures < self.failure_threshold or 0 < self.successes < self.success_threshold

    @property
    def returns(self) -> bool:
        """True when enough probes in a row were good for the worker to be used again."""
        return self.successes >= self.success_threshold

    def failed(self, proof: Severity, *, began: float, now: float, heard: float) -> bool:
        """Count a failure of an attempt begun at ``began``. Returns True when the worker must be quarantined.

        ``heard``: the time at which the worker last sent a part of an answer to other traffic.
        """
        if proof == "none" or (proof == "silent" and heard >= began):
            return False
        if heard > self._failed_at:
            self._soft = 0
        if proof == "firm":
            self._firm += 1
        else:
            self._soft += 1
        self._failed_at = now
        self.successes = 0
        self.verified = False
        self.vouched_at = None
        self.may_be_another = True
        return self.failures >= self.failure_threshold

    def passed(self) -> None:
        """Count a good probe."""
        self._firm = self._soft = 0
        self.successes += 1

    def trust(self) -> None:
        """Note that the worker is well and has the right weights."""
        self._firm = self._soft = 0
        self.successes = self.success_threshold
        self.verified = True

    def distrust(self) -> None:
        """Note that the worker was set aside: it needs good probes to return."""
        self.successes = 0
        self.verified = False
