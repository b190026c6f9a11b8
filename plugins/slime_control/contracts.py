"""The components that this plugin offers to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router_core.exchange import Exchange
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["ControlEvents", "OnAbort", "OnPause", "PendingAborts", "QuietPeriod"]

#: Called with the beginning of the rids that an abort ends, ``""`` for all.
OnAbort = Callable[[str], None]
#: Called with True when the engines pause, with False when they continue.
OnPause = Callable[[bool], None]


class ControlEvents(Protocol):
    """Pauses and aborts on their way through the router; the component ``"control_events"``.

    ``paused``: the engines were told to pause, and none has continued since then.
    """

    paused: bool

    def subscribe(self, on_abort: OnAbort, on_pause: OnPause | None = None) -> None:
        """Call ``on_abort`` before the engines are told, and ``on_pause`` when new generations wait, or go on."""
        ...


class PendingAborts(Protocol):
    """The aborts that are on their way to workers; the component ``"pending_aborts"``."""

    async def settled(self, worker: Worker, exchange: Exchange) -> None:
        """Return when ``worker`` has answered those of this moment, after two seconds at the latest.

        Raises Aborted when ``exchange``, which waits to be sent there, has been aborted or left meanwhile.
        """
        ...

    def rename(self, request: Request) -> bool:
        """Give ``request`` another name, unless its client has named it. True when it has one.

        Where nobody has heard of the old name yet: an engine refuses one that it has not done with.
        """
        ...


class QuietPeriod(Protocol):
    """The times in which healthy engines may be silent; the component ``"quiet_period"``."""

    def covers(self, began: float) -> bool:
        """True when a probe that began at ``began`` (loop time) may have waited for the end of such a time."""
        ...
