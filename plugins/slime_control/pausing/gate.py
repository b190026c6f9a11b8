"""A gate at which new generation requests wait while the engines are paused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import ClassVar

import anyio

from router_core.errors import HTTPError, ShuttingDown

__all__ = ["Gate", "Paused"]


class Paused(HTTPError):
    """Generation was paused, and did not continue in time."""

    status = 503
    type: ClassVar[str] = "service_unavailable"
    code: ClassVar[str] = "GENERATION_PAUSED"


class _Waiting:
    """A request that waits at the gate, and the rids by which it may be aborted. ``news``: set to wake the request."""

    __slots__ = ("aborted", "news", "rids")

    def __init__(self, rids: Iterable[str]) -> None:
        self.rids = tuple(rids)
        self.aborted = False
        self.news = anyio.Event()


class Gate:
    """A gate, open at first. ``on_change`` is called with True when the gate closes, with False when it opens.

    No change of this state has an ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self, on_change: Callable[[bool], None] = lambda closed: None) -> None:
        self.closed = False
        self.ended = False
        self._on_change = on_change
        self._moves = 0
        self._closed_at = 0.0
        self._waiting: dict[_Waiting, None] = {}

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @property
    def closed_s(self) -> float:
        """Seconds since the gate closed the last time."""
        return monotonic() - self._closed_at

    def close(self) -> int | None:
        """Make new requests wait. Returns the argument for :meth:`undo`; None when the gate was closed already."""
        if self.closed:
            return None
        self.closed = True
        self._closed_at = monotonic()
        self._moves += 1
        self._on_change(True)
        return self._moves

    def undo(self, move: int) -> None:
        """Open the gate, unless it was opened or closed again since :meth:`close` returned ``move``."""
        if move == self._moves:
            self.open()

    def open(self) -> None:
        """Let all requests pass."""
        was_closed, self.closed = self.closed, False
        self._moves += 1
        if was_closed:
            self._on_change(False)
        self._tell(self._waiting)

    def end(self) -> None:
        """End all waits, since the router shuts down."""
        self.ended = True
        self._tell(self._waiting)

    def abort(self, prefix: str) -> None:
        """End the wait of the requests whose rids all begin with ``prefix``."""
        ended = [each for each in self._waiting if all(rid.startswith(prefix) for rid in each.rids)]
        for each in ended:
            each.aborted = True
        self._tell(ended)

    def _tell(self, waiting: Iterable[_Waiting]) -> None:
        for each in waiting:
            each.news.set()

    async def wait(self, rids: Iterable[str], timeout_s: float) -> bool:
        """Wait until the gate is open (returns True) or the request is aborted (False). Raises Paused, ShuttingDown."""
        waiting = _Waiting(rids)
        self._waiting[waiting] = None
        try:
            with anyio.fail_after(timeout_s):
                while self.closed and not waiting.aborted:
                    if self.ended:
                        raise ShuttingDown("the router is shutting down")
                    waiting.news = anyio.Event()
                    await waiting.news.wait()
        except TimeoutError:
            raise Paused(
                f"generation is paused, and did not continue within {timeout_s:g} s (--pause-queue-timeout-s)"
            ) from None
        finally:
            del self._waiting[waiting]
        return not waiting.aborted
