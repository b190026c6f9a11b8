"""Event loops whose clocks stand still while the machine does other work.

Whatever a router, its workers and a test measure or wait for on one such loop keeps its order on a busy machine: a
breaker's 0.2 s do not pass between two lines because another process ran there. Threads and other processes live in
real time; so does whoever asks :mod:`time`.
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

#: Seconds that uvloop waits at most in one go: no more are counted when the machine does other work then.
_TICK_S = 0.01
_SHORTEST_TICK_S = 0.001
#: Seconds for which the time that a thread has computed counts as known: asking the kernel takes 1 us.
_KNOWN_S = 0.0002


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """asyncio's loop. Its time is what it computed plus what it waited, no longer than it wanted to wait."""

    def __init__(self) -> None:
        self._waits = _CountingSelector()
        self._asked_at = time.monotonic()
        self._computed_s = time.thread_time()
        # as large as a real clock: far from the zero of "never"
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
        """Close what comes in the moment in which the server closes; asyncio fails over it, and leaves it open."""
        if server.is_serving():
            await super()._accept_connection2(factory, conn, extra, ssl, server, *more)  # type: ignore[misc]
        else:
            conn.close()


class _CountingSelector(selectors.DefaultSelector):
    """Counts the seconds that its callers wanted to wait and did."""

    total_s = 0.0

    def select(self, timeout: float | None = None) -> _Events:
        began = time.monotonic()
        events = super().select(timeout)
        if timeout is None:
            self.total_s += time.monotonic() - began
        elif timeout > 0:
            # Timed out, it has waited for just so long; woken late, it has not waited longer.
            self.total_s += min(time.monotonic() - began, timeout) if events else timeout
        return events


class OwnTimeUvloop(uvloop.Loop):
    """uvloop, which does not tell what it waits: while there are timers, that time goes on in short ticks.

    As with asyncio's loop, a tick that comes late has taken no longer than it was to take.
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

    def call_later(  # type: ignore[override]  # uvloop has a class of its own for them
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
        """It is dropped when its turn comes."""

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
        """Count what was computed since the last tick, or waited."""
        now, computed_s = time.monotonic(), time.thread_time()
        waited_s = min(now - self._ticked_at, self._tick_s)
        self._time += max(waited_s, computed_s - self._computed_s)
        self._ticked_at, self._computed_s = now, computed_s


#: Values of ``anyio_backend`` for them.
OWN_TIME: Backend = ("asyncio", {"loop_factory": OwnTimeLoop})
OWN_TIME_UVLOOP: Backend = ("asyncio", {"loop_factory": OwnTimeUvloop})
