"""Pauses, aborts and flushes that pass through the control plane, for other plugins to subscribe to."""

from __future__ import annotations

from slime_control.contracts import OnAbort, OnFlush, OnPause

__all__ = ["ControlEvents"]


class ControlEvents:
    """The component ``"control_events"``, see :class:`slime_control.contracts.ControlEvents`.

    No change of this state has an ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self) -> None:
        self.paused = False
        self._on_abort: list[OnAbort] = []
        self._on_pause: list[OnPause] = []
        self._on_flush: list[OnFlush] = []

    def subscribe(
        self,
        on_abort: OnAbort | None = None,
        on_pause: OnPause | None = None,
        on_flush: OnFlush | None = None,
    ) -> None:
        """See :class:`slime_control.contracts.ControlEvents`."""
        if on_abort is not None:
            self._on_abort.append(on_abort)
        if on_pause is not None:
            self._on_pause.append(on_pause)
        if on_flush is not None:
            self._on_flush.append(on_flush)

    def abort(self, prefix: str) -> None:
        """Notify subscribers of an abort of the rids that begin with ``prefix``."""
        for tell in self._on_abort:
            tell(prefix)

    def pause(self, paused: bool) -> None:
        """Notify subscribers that the engines pause, or continue."""
        self.paused = paused
        for tell in self._on_pause:
            tell(paused)

    def flush(self) -> None:
        """Notify subscribers that the engines may have dropped their KV caches."""
        for tell in self._on_flush:
            tell()
