"""The reads of one directory, in threads and with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from errno import ETIMEDOUT
from functools import partial
from time import monotonic

from slime_tiered_store.tiers.ssd.directory import SsdDirectory
from slime_tiered_store.tiers.ssd.run_buffer import RunBuffer
from slime_tiered_store.tiers.ssd.runs import SlotRun
from slime_tiered_store.tiers.ssd.threads import StartedThreads

__all__ = ["Readers"]

_THREADS = 4
#: A call bypasses the page cache only if it reads at least this many times ``FileOps.direct_bytes`` bytes. Fewer bytes
#: are read faster through the cache, whether their blocks are adjacent or scattered.
_LEAST_LONG_RUNS = 16
_PART_BYTES = 4 << 20  # how much a thread reads through the page cache at a time
_SEEK_BYTES = 128 << 10  # an NVMe disk reads about as many bytes in the time in which it answers a short read


class Readers:
    """Threads that read blocks of ``directory``.

    A call fails when the device does not answer: one of its reads has taken ``limit_s`` seconds, or the call waits for
    a thread and no thread has ended a read for ``limit_s`` seconds. A thread whose read has taken ``limit_s`` seconds
    is *stuck*, and stays until the device answers. While all threads are stuck, calls fail at once.
    """

    def __init__(self, directory: SsdDirectory, name: str, limit_s: float) -> None:
        self._directory = directory
        self._limit_s = limit_s
        self._buffers = directory.buffers(_THREADS)
        self._threads = StartedThreads(_THREADS, name)
        self._latest_end = 0.0
        self._running: set[_Part] = set()

    async def read(self, runs: Sequence[SlotRun]) -> dict[bytes, str]:
        """Fill the buffers with the beginnings of blocks. Return what is wrong with each damaged block, by key.

        Raises OSError. No thread uses the buffers when the call has ended.
        """
        call = _Call(self._directory, runs)
        try:
            for part in tuple(call.parts):
                self._threads.submit(partial(self._run, call, part))
            self._watch(call, monotonic())
            await call.ended
            return call.damaged
        finally:
            call.abandon()

    def close(self) -> None:
        """Return when no thread reads any more. Blocks the caller."""
        self._threads.close()

    def _run(self, call: _Call, part: _Part) -> None:
        if call.is_abandoned:
            return
        part.began = monotonic()
        self._running.add(part)
        error: BaseException | None = None
        try:
            with self._buffers.take() as buffer:
                call.read(part.runs, buffer)
        except OSError as raised:
            # With a traceback, the error would refer to the call, and the call to the error.
            error = raised.with_traceback(None)
        except BaseException as raised:  # a bug in this code must reach the caller, too
            error = raised
        self._running.remove(part)
        self._latest_end = monotonic()
        call.end(part, error)

    @property
    def _is_stuck(self) -> bool:
        latest = monotonic() - self._limit_s
        return sum(part.began <= latest for part in self._running.copy()) == _THREADS

    def _watch(self, call: _Call, called: float) -> None:
        """Let a call fail when the device does not answer. Calls itself until the call has ended."""
        waits = max(called, self._latest_end)
        began = min((part.began or waits for part in call.parts.copy()), default=monotonic())
        left = began + self._limit_s - monotonic()
        if left <= 0 or self._is_stuck:
            call.fail(OSError(ETIMEDOUT, f"no answer within {self._limit_s:g} s"))
        else:
            call.watch = call.loop.call_later(left, self._watch, call, called)


class _Part:
    """Runs that one thread reads. ``began``: when the reading began, by the monotonic clock; 0 until it begins."""

    def __init__(self, runs: Sequence[SlotRun]) -> None:
        self.began = 0.0
        self.runs = runs


class _Call:
    """A call of :meth:`Readers.read`. ``parts``: the parts that have not ended yet.

    ``ended``: done when the call has ended; then ``damaged`` is complete. Threads change ``parts`` and ``damaged``.
    Only the event loop changes the other fields.
    """

    def __init__(self, directory: SsdDirectory, runs: Sequence[SlotRun]) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.watch: asyncio.TimerHandle | None = None
        # A long call bypasses the page cache. Each of its runs is a part, so that all threads end at about the same
        # time. A short call uses the cache, because Linux reads ahead there.
        blocks = sum(len(run.keys) for run in runs)
        self._is_direct = directory.is_long(blocks, max(len(runs), _LEAST_LONG_RUNS))
        parts = [[run] for run in runs] if self._is_direct else _cut(runs)
        self.parts = dict.fromkeys(map(_Part, parts))
        self.damaged: dict[bytes, str] = {}
        self.is_abandoned = False
        self._directory = directory
        self._lock = threading.Lock()

    def read(self, runs: Sequence[SlotRun], buffer: RunBuffer) -> None:
        """Read runs. A thread of the Readers calls this."""
        for run in runs:
            contents, damaged = self._directory.read(run, buffer, direct=self._is_direct)
            with self._lock:
                if self.is_abandoned:
                    break
                self.damaged |= damaged
                for into, content in zip(run.buffers, contents, strict=True):
                    into[:] = content

    def end(self, part: _Part, error: BaseException | None) -> None:
        """Record that a part has ended. A thread of the Readers calls this."""
        with self._lock:
            del self.parts[part]
            is_over = error is not None or not self.parts
            if is_over and not self.is_abandoned and not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.fail, error)

    def fail(self, error: BaseException | None) -> None:
        """End the call, with ``error`` or without one."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def abandon(self) -> None:
        """Keep the threads from using the buffers from now on."""
        with self._lock:
            self.is_abandoned = True
        if self.watch is not None:
            self.watch.cancel()


def _cut(runs: Sequence[SlotRun]) -> Iterator[Sequence[SlotRun]]:
    """Cut runs into parts of about 4 MiB, or less if the runs are short. One thread reads a part."""
    size = begin = 0
    for end, run in enumerate(runs, 1):
        size += _SEEK_BYTES + sum(map(len, run.buffers))
        if size >= _PART_BYTES or end == len(runs):
            yield runs[begin:end]
            size, begin = 0, end
