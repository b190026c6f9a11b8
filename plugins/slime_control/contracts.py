"""The components that this plugin offers to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router_core.exchange import Exchange
from router_core.request import Request
from router_core.workers import Worker

__all__ = ["ControlEvents", "OnAbort", "OnFlush", "OnPause", "PendingAborts", "QuietPeriod"]

#: Called with the prefix of the rids to abort. The empty prefix aborts all requests.
OnAbort = Callable[[str], None]
#: Called with True when the engines pause, with False when they continue.
OnPause = Callable[[bool], None]
#: Called after a call that drops the engines' KV caches.
OnFlush = Callable[[], None]


class ControlEvents(Protocol):
    """Pauses, aborts and flushes on their way through the router; the component ``"control_events"``.

    ``paused``: True while new generations wait because the engines are paused.
    """

    paused: bool

    def subscribe(
        self,
        on_abort: OnAbort | None = None,
        on_pause: OnPause | None = None,
        on_flush: OnFlush | None = None,
    ) -> None:
        """Call ``on_abort`` before an abort is sent, and ``on_pause`` when new generations begin or cease to wait.

        ``on_flush`` is called when a call that drops the engines' KV caches or memory has ended, even if it failed.
        """
        ...

    def abort(self, prefix: str) -> None:
        """Notify subscribers of an abort of the rids that begin with ``prefix``."""
        ...


class PendingAborts(Protocol):
    """The aborts that workers have not answered yet; the component ``"pending_aborts"``."""

    async def settled(self, worker: Worker, exchange: Exchange) -> None:
        """Return when the aborts pending now at ``worker`` were answered or have failed, or after two seconds.

        Raises Aborted when ``exchange`` was aborted, or its client has disconnected.
        """
        ...

    def rename(self, request: Request) -> bool:
        """Replace the rid that the router gave to ``request``. Returns False when ``request`` has no such rid.

        An engine refuses a rid while it still has a request with that rid. Call this before the client can know the
        old rid.
        """
        ...


class QuietPeriod(Protocol):
    """The times in which healthy engines may be silent; the component ``"quiet_period"``."""

    def covers(self, began: float) -> bool:
        """Return True when a probe that began at ``began`` (loop time) overlaps a quiet period."""
        ...
