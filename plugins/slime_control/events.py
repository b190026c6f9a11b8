"""Pauses and aborts that pass through the control plane, for other plugins to subscribe to."""

from __future__ import annotations

from functools import partial

from router_core import Exchange
from slime_control.contracts import OnAbort, OnPause
from slime_sglang.aborts import abort_prefix

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

    def see(self, exchange: Exchange) -> None:
        """``exchange`` is a control call, and goes to the engines. Raises BadRequest for too long a name."""
        path = exchange.request.path
        if path == "/abort_request":
            prefix = abort_prefix(exchange.request)
            if prefix is not None:
                for tell in self._on_abort:
                    tell(prefix)
        elif path == "/pause_generation":
            was_paused = self.paused
            self._pause(paused=True)
            if not was_paused:  # one that failed changes nothing
                exchange.on_close(partial(self._after, exchange, failed=True))
        elif path == "/continue_generation":
            exchange.on_close(partial(self._after, exchange, failed=False))

    def _after(self, exchange: Exchange, *, failed: bool) -> None:
        """``exchange`` has ended: the engines go on if it ``failed``, or if it did not."""
        # One whose caller hangs up goes on all the same.
        if failed == (exchange.reply is not None and exchange.reply.status >= 400):
            self._pause(paused=False)

    def _pause(self, *, paused: bool) -> None:
        self.paused = paused
        for tell in self._on_pause:
            tell(paused)
