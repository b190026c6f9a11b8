"""Pauses and aborts that pass through the router, and the generations that they affect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from slime_control.contracts import ControlEvents

__all__ = ["Interruptions", "Watch"]


class Watch:
    """One running generation. ``asked``: the number of aborts noted before it began. ``rids``: its known rids.

    ``paused``: the number of pauses when the generation began, or when it last waited.
    """

    __slots__ = ("asked", "paused", "rids")

    def __init__(self, asked: int, paused: int, rids: Iterable[str]) -> None:
        self.asked = asked
        self.paused = paused
        self.rids = set(rids)


class Interruptions:
    """Remembers the aborts and pauses that clients and trainers request.

    An abort is remembered as long as a generation runs that began before the abort. No change of this state has an
    ``await`` in the middle, so on one event loop it needs no lock.
    """

    def __init__(self, longest_pause_s: float = 1800.0) -> None:
        self._longest_pause_s = longest_pause_s
        self._watches: dict[Watch, None] = {}
        self._aborts: deque[tuple[int, str]] = deque()
        self._asked = 0
        self._pauses = 0
        self._paused = False
        self._is_ending = False
        self._news: anyio.Event | None = None

    # Pauses and aborts.

    def follow(self, events: ControlEvents) -> None:
        """Note the pauses and aborts of ``events`` from now on."""
        events.subscribe(self.abort, self.pause)

    def abort(self, prefix: str) -> None:
        """Note an abort of all rids that begin with ``prefix``."""
        self._asked += 1
        if self._watches:
            self._aborts.append((self._asked, prefix))
        self._tell()

    def pause(self, paused: bool) -> None:
        """Note that the engines pause, or continue."""
        self._paused = paused
        self._pauses += paused
        if paused and self._is_ending:
            self.abort("")
        self._tell()

    async def end_with(self, stopping: anyio.Event) -> None:
        """Wait until the router is ``stopping``. From then on, no generation waits for the end of a pause."""
        await stopping.wait()
        self._is_ending = True
        if self._paused:
            self.abort("")

    # Generations under way.

    def watch(self, rids: Iterable[str]) -> Watch:
        """Watch a generation that begins. Pass the result to :meth:`forget` when it has ended."""
        watch = Watch(self._asked, self._pauses, rids)
        self._watches[watch] = None
        return watch

    def forget(self, watch: Watch) -> None:
        """End the watch of a generation."""
        del self._watches[watch]
        oldest = next(iter(self._watches), None)
        while self._aborts and (oldest is None or self._aborts[0][0] <= oldest.asked):
            self._aborts.popleft()

    def was_asked(self, watch: Watch) -> bool:
        """Return True when a client requested, through the router, to abort this generation. O(remembered aborts)."""
        return any(
            number > watch.asked and (not prefix or any(rid.startswith(prefix) for rid in watch.rids))
            for number, prefix in self._aborts
        )

    async def wait(self, watch: Watch, wait_s: float) -> None:
        """Wait until this generation may be tried again, or a client requests its abort.

        The wait takes ``wait_s``, or no time if a pause since the last attempt explains the abort. While the engines
        are paused, wait until they continue, but for ``longest_pause_s`` at most: the trainer may have died.
        """
        until = anyio.current_time() + wait_s
        longest = anyio.current_time() + self._longest_pause_s
        while not self.was_asked(watch) and (self._paused or watch.paused == self._pauses):
            if self._news is None:
                self._news = anyio.Event()
            with anyio.CancelScope(deadline=longest if self._paused else until) as patience:
                await self._news.wait()
            if patience.cancelled_caught:
                break
        watch.paused = self._pauses

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()
