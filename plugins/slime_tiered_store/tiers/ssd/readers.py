"""The reads of one directory, in threads and with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import ETIMEDOUT
from time import monotonic

from slime_tiered_store.tiers.ssd.directory import SsdDirectory
from slime_tiered_store.tiers.ssd.run_buffer import RunBuffer
from slime_tiered_store.tiers.ssd.runs import SlotRun, longest_run

__all__ = ["Readers"]

_THREADS = 4
_READ_BYTES = 4 << 20  # read by one call in a thread


class Readers:
    """Threads that read blocks of ``directory``.

    A call fails when the device does not answer: a thread has read for ``limit_s`` seconds, or no thread has ended a
    read in that time. A stuck thread stays until the device answers. While all threads are stuck, calls fail at once.
    """

    def __init__(self, directory: SsdDirectory, name: str, limit_s: float) -> None:
        self._directory = directory
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_THREADS, name)
        self._latest_end = 0.0
        self._running: set[_Read] = set()
        #: Buffers that no thread uses now. To allocate one would cost more than to copy a read out of it.
        self._idle_buffers: list[RunBuffer] = []

    async def read(self, runs: Sequence[SlotRun]) -> dict[bytes, str]:
        """Fill the buffers with the beginnings of blocks. Return what is wrong with each damaged block, by key.

        Raises OSError. No thread uses the buffers when the call has ended.
        """
        reads = [_Read(self._directory, some) for some in _pieces(runs)]
        calls = {asyncio.wrap_future(self._threads.submit(self._run, one)): one for one in reads}
        try:
            await self._end(calls)
            return {key: reason for call in calls for key, reason in call.result().items()}
        finally:
            for call, read in calls.items():
                call.cancel()
                read.abandon()

    def close(self) -> None:
        """Return when no thread reads any more. Blocks the caller."""
        self._threads.shutdown()

    def _run(self, read: _Read) -> dict[bytes, str]:
        read.began = monotonic()
        self._running.add(read)
        try:
            buffer = self._idle_buffers.pop()
        except IndexError:
            layout = self._directory.layout
            buffer = layout.buffer(longest_run(layout.slot_bytes))
        try:
            return read.run(buffer)
        finally:
            self._idle_buffers.append(buffer)
            self._running.remove(read)
            self._latest_end = monotonic()

    @property
    def _is_stuck(self) -> bool:
        latest = monotonic() - self._limit_s
        return sum(read.began <= latest for read in self._running.copy()) == _THREADS

    async def _end(self, calls: dict[asyncio.Future[dict[bytes, str]], _Read]) -> None:
        """Wait until all calls have ended, or one has failed. Raises OSError when the device does not answer."""
        called, waiting = monotonic(), set(calls)
        while waiting:
            waits = max(called, self._latest_end)
            left = min(calls[call].began or waits for call in waiting) + self._limit_s - monotonic()
            if left <= 0 or self._is_stuck:
                raise OSError(ETIMEDOUT, f"no answer within {self._limit_s:g} s")
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            for call in done:
                call.result()


class _Read:
    """A read in a thread. ``began``: its start, in seconds of the monotonic clock; 0 before the start."""

    def __init__(self, directory: SsdDirectory, runs: Sequence[SlotRun]) -> None:
        self.began = 0.0
        self._directory = directory
        self._runs = runs
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self, buffer: RunBuffer) -> dict[bytes, str]:
        damaged: dict[bytes, str] = {}
        for run in self._runs:
            contents, wrong = self._directory.read(run, buffer)
            damaged |= wrong
            with self._lock:
                if self._is_abandoned:
                    break
                for into, content in zip(run.buffers, contents, strict=True):
                    into[:] = content
        return damaged

    def abandon(self) -> None:
        """Keep the thread from using the buffers from now on."""
        with self._lock:
            self._is_abandoned = True


def _pieces(runs: Sequence[SlotRun]) -> Iterator[Sequence[SlotRun]]:
    """Cut reads into parts of about 4 MiB, one call in a thread each."""
    size = begin = 0
    for end, run in enumerate(runs, 1):
        size += sum(map(len, run.buffers))
        if size >= _READ_BYTES or end == len(runs):
            yield runs[begin:end]
            size, begin = 0, end
