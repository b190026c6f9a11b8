"""Event loops whose clocks stand still while the machine does other work.

On one such loop, the timers of a router, its workers and a test keep their order on a busy machine: the 0.2 s of a
circuit breaker do not pass between two lines of a test because another process had the core. Threads, other processes
and code that calls :mod:`time` have real time.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import time
from collections.abc import Callable
from contextvars import Context
from socket import socket
from typing import Any

import uvloop

__all__ = ["OWN_TIME", "OWN_TIME_UVLOOP", "Backend", "OwnTimeLoop", "OwnTimeUvloop"]

Backend = tuple[str, dict[str, Any]]
_Events = list[tuple[selectors.SelectorKey, int]]

#: Longest wait of uvloop, in seconds. No more is counted for a wait, even if the machine does other work meanwhile.
_TICK_S = 0.01
_SHORTEST_TICK_S = 0.001
#: Seconds for which the processor time of a thread is not asked for again: asking the kernel takes 1 us.
_KNOWN_S = 0.0002


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """asyncio's loop. Its time is what it computed plus what it waited, without delays at the ends of its waits."""

    def __init__(self) -> None:
        self._waits = _CountingSelector()
        self._asked_at = time.monotonic()
        self._computed_s = time.thread_time()
        # The clock begins at the real time, not at 0, which may mean "never" to other code.
        self._began = self._asked_at - self._computed_s
        super().__init__(self._waits)

    def time(self) -> float:
        now = time.monotonic()
        if now - self._asked_at > _KNOWN_S:
            self._asked_at, self._computed_s = now, time.thread_time()
        return self._began + self._computed_s + self._waits.total_s

    async def _accept_connection2(
        self, factory: Any, conn: socket, extra: Any, ssl: Any, server: Any, *more: Any
    ) -> None:
        """Close a connection that comes while the server closes: asyncio would raise an error, and leave it open."""
        if server.is_serving():
            await super()._accept_connection2(factory, conn, extra, ssl, server, *more)  # type: ignore[misc]
        else:
            conn.close()


class _CountingSelector(selectors.DefaultSelector):
    """Counts the seconds that its callers wait, without delays at the ends of these waits."""

    total_s = 0.0

    def select(self, timeout: float | None = None) -> _Events:
        began = time.monotonic()
        events = super().select(timeout)
        if timeout is None:
            self.total_s += time.monotonic() - began
        elif timeout > 0:
            # A wait that timed out counts as ``timeout``, even if it took longer. No wait counts as more than that.
            self.total_s += min(time.monotonic() - began, timeout) if events else timeout
        return events


class OwnTimeUvloop(uvloop.Loop):
    """uvloop. It does not tell how long it waits, so while there are timers, its time goes on in short ticks.

    As with asyncio's loop, a tick that comes late counts for no longer than it should have taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self._time = self._ticked_at = time.monotonic()
        self._computed_s = time.thread_time()
        self._timers: list[asyncio.TimerHandle] = []
        self._tick_s = 0.0
        self._next_tick: asyncio.TimerHandle | None = None

    def time(self) -> float:
        return self._time + time.thread_time() - self._computed_s

    def call_later(  # type: ignore[override]  # uvloop's timers have a class of their own
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        now = self.time() if delay > 0 else self._time
        return self.call_at(now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when <= self.time():
            self.call_soon(self._run, timer)
            return timer
        heapq.heappush(self._timers, timer)
        if self._next_tick is None or when < self._time + self._tick_s:
            self._advance()
            self._tick_again()
        return timer

    def _timer_handle_cancelled(self, _: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""

    def _tick_again(self) -> None:
        if self._next_tick is not None:
            self._next_tick.cancel()
        until_due_s = self._timers[0].when() - self._time
        self._tick_s = min(max(until_due_s, _SHORTEST_TICK_S), _TICK_S)
        self._next_tick = super().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._advance()
        while self._timers and self._timers[0].when() <= self._time:
            self._run(heapq.heappop(self._timers))
        self._tick_s, self._next_tick = 0.0, None
        if self._timers:
            self._tick_again()

    def _run(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            timer._run()  # as asyncio's loop does

    def _advance(self) -> None:
        """Add the time that was computed since the last tick, or the time that was waited, whichever is longer."""
        now, computed_s = time.monotonic(), time.thread_time()
        waited_s = min(now - self._ticked_at, self._tick_s)
        self._time += max(waited_s, computed_s - self._computed_s)
        self._ticked_at, self._computed_s = now, computed_s


#: Values of ``anyio_backend`` for these loops.
OWN_TIME: Backend = ("asyncio", {"loop_factory": OwnTimeLoop})
OWN_TIME_UVLOOP: Backend = ("asyncio", {"loop_factory": OwnTimeUvloop})
