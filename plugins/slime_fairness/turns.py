"""Turns for long work: clients get them in rotation, so that none waits for all the work of another."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread

__all__ = ["Breaks", "FairThreads", "FairTurns"]

T = TypeVar("T")

#: Seconds of work between two breaks.
_AT_ONCE_S = 0.002
_NICE = 10


class FairTurns:
    """Turns for clients. At most ``places`` clients have a turn at the same time.

    No change of the turns has an ``await`` in the middle, so on one event loop they need no lock.
    """

    def __init__(self, places: int = 1) -> None:
        self._free = places
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of turns that clients wait for."""
        return sum(map(len, self._waiting.values()))

    def turn(self, client: Hashable) -> _Turn:
        """Return an async context manager, which is entered when it is the turn of ``client``."""
        return _Turn(self, client)

    async def pause(self, client: Hashable) -> None:
        """Let others have the event loop, in the middle of long work that cannot be cut into steps."""
        async with self.turn(client):
            await asyncio.sleep(0)

    def breaks(self, client: Hashable) -> Breaks:
        """Return breaks for a loop of many small parts: call ``await breaks.take()`` in each part."""
        return Breaks(self, client)

    async def run(self, steps: Generator[None, None, T], client: Hashable) -> T:
        """Run ``steps`` on the event loop, each in a turn. With one place, at most one runs per iteration of the loop.

        Returns what ``steps`` returns.
        """
        while True:
            async with self.turn(client):
                try:
                    next(steps)
                except StopIteration as end:
                    value: T = end.value
                    return value
                await asyncio.sleep(0)

    async def _take(self, client: Hashable) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            else:  # the turn was given already
                self._give_back()
            raise

    def _leave(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client, ())
        if turn in turns:
            self._waiting[client].remove(turn)
            if not turns:
                del self._waiting[client]

    def _give_back(self) -> None:
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _Turn:
    __slots__ = ("_client", "_turns")

    def __init__(self, turns: FairTurns, client: Hashable) -> None:
        self._turns = turns
        self._client = client

    async def __aenter__(self) -> None:
        await self._turns._take(self._client)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns._give_back()


class Breaks:
    """Pauses in long work, one after each ``_AT_ONCE_S`` of work."""

    def __init__(self, turns: FairTurns, client: Hashable) -> None:
        self._turns = turns
        self._client = client
        self._since = perf_counter()

    async def take(self) -> None:
        """Let others have the event loop, if it is time."""
        if perf_counter() - self._since > _AT_ONCE_S:
            await self._turns.pause(self._client)
            self._since = perf_counter()


class FairThreads:
    """Threads for work that cannot be cut into steps. Clients get them in rotation.

    There is one thread fewer than there are cores, but at least one.
    """

    def __init__(self) -> None:
        number = _threads()
        self._threads = anyio.CapacityLimiter(number)
        self._turns = FairTurns(number)

    async def run(self, work: Callable[[], T], client: Hashable) -> T:
        """Run ``work`` in a thread at the turn of ``client``. Returns the result of ``work``, or raises its error."""
        async with self._turns.turn(client):
            done = await anyio.to_thread.run_sync(_at_low_priority, work, limiter=self._threads)
        if not isinstance(done, _Raised):
            return done
        try:
            raise done.error
        finally:
            del done  # else the error and this frame would refer to each other


class _Raised(NamedTuple):
    """An error that is returned from a thread, not raised there.

    If anyio raised it, the error and anyio's future would refer to each other. Then all that the error's traceback
    refers to, such as a refused request body of 20 MB, would stay in memory until the garbage collector runs.
    """

    error: Exception


def _at_low_priority(work: Callable[[], T]) -> T | _Raised:
    """Run ``work`` in this thread, on Linux at a lower priority than the event loop's thread."""
    if sys.platform == "linux":  # elsewhere this would set the priority of the whole process
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        return work()
    except Exception as error:
        return _Raised(error)


def _threads() -> int:
    """Return the number of cores less one, at least 1. More threads would leave the event loop too little time."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores - 1)
