"""Pauses and aborts that pass through the control plane, for other plugins to subscribe to."""

from __future__ import annotations

from slime_control.contracts import OnAbort, OnPause

__all__ = ["ControlEvents"]


class ControlEvents:
    """The component ``"control_events"``, see :class:`slime_control.contracts.ControlEvents`.

    Changed only by functions without ``await``: one event loop needs no lock.
    """

    def __init__(self) -> None:
        self.paused = False
        self._on_abort: list[OnAbort] = []
        self._on_pause: list[OnPause] = []

    def subscribe(self, on_abort: OnAbort, on_pause: OnPause | None = None) -> None:
        """See :class:`slime_control.contracts.ControlEvents`."""
        self._on_abort.append(on_abort)
        if on_pause is not None:
            self._on_pause.append(on_pause)

    def abort(self, prefix: str) -> None:
        """Notify subscribers of an abort of the rids that begin with ``prefix``."""
        for tell in self._on_abort:
            tell(prefix)

    def pause(self, paused: bool) -> None:
        """Notify subscribers that the engines pause, or continue."""
        self.paused = paused
        for tell in self._on_pause:
            tell(paused)
