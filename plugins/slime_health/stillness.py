"""Times in which engines that are well may say nothing: they were told to pause, or to take new weights."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from router_core import Exchange

__all__ = ["Stillness"]

_PAUSE, _CONTINUE = b"/pause_generation", b"/continue_generation"
#: As they begin. SGLang generates for a probe as for anybody else, so probes wait as well, and get a 503 in the end.
_CALLS = (
    _PAUSE, _CONTINUE, b"/update_weights_from_", b"/init_weights_update_group", b"/destroy_weights_update_group",
    b"/release_memory_occupation", b"/resume_memory_occupation",
)  # fmt: skip


class Stillness:
    """Learns from the control calls that pass. What trainers tell the engines themselves nobody here knows."""

    def __init__(self) -> None:
        self._under_way = 0
        self._paused = False
        self._ended_at = -math.inf

    def see(self, exchange: Exchange) -> None:
        """``exchange`` begins."""
        target = exchange.request.target
        if target.startswith(_CALLS):
            self._under_way += 1
            if target.startswith(_PAUSE):
                self._paused = True
            exchange.on_close(partial(self._end, exchange, target))

    def _end(self, exchange: Exchange, target: bytes) -> None:
        self._under_way -= 1
        self._ended_at = asyncio.get_running_loop().time()
        reply = exchange.reply
        # Without a reply it was refused, or its client has left and it goes on.
        succeeded = reply.status < 300 if reply is not None else exchange.gone
        if (target.startswith(_PAUSE) and not succeeded) or (target.startswith(_CONTINUE) and succeeded):
            self._paused = False

    def excuses(self, began: float) -> bool:
        """True when a probe that began at ``began`` may have waited for the end of such a time."""
        return self._paused or self._under_way > 0 or began <= self._ended_at
