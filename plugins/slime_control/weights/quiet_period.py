"""Times in which healthy engines may be silent: during a pause, or a call such as an update of weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from slime_control.calls.endpoints import Call
from slime_control.pausing.gate import Gate

__all__ = ["QuietPeriod"]

#: Calls during which engines go on generating. During other calls SGLang may generate nothing, so a probe waits, and
#: gets a 503 in the end.
_BESIDE = frozenset(("/abort_request", "/flush_cache", "/start_profile", "/stop_profile"))


class QuietPeriod:
    """The component ``"quiet_period"``, see :class:`slime_control.contracts.QuietPeriod`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._under_way = 0
        self._ended_at = -math.inf

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Count ``call`` as under way."""
        if call.path in _BESIDE:
            yield
            return
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._ended_at = asyncio.get_running_loop().time()

    def covers(self, began: float) -> bool:
        """See :class:`slime_control.contracts.QuietPeriod`."""
        return self._gate.closed or self._under_way > 0 or began <= self._ended_at
