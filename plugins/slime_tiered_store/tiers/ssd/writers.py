"""Threads that write runs of blocks to one directory at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from slime_tiered_store.tiers.ssd.directory import SsdDirectory
from slime_tiered_store.tiers.ssd.run_buffer import RunBuffer, RunBuffers
from slime_tiered_store.tiers.ssd.runs import SlotRun
from slime_tiered_store.tiers.ssd.threads import StartedThreads

__all__ = ["Writers"]

_THREADS = 4  # the caller's thread is one of them
#: A long run (see ``SsdDirectory.is_direct``) may bypass the page cache. The long runs of a batch bypass it only if
#: they have at least this many times ``FileOps.direct_bytes`` bytes in total: fewer bytes are written faster through
#: the cache.
_LEAST_LONG_RUNS = 4


class Writers:
    """Writes the runs of several calls in one batch. Use it in one thread at a time."""

    def __init__(self, directory: SsdDirectory, name: str) -> None:
        self._directory = directory
        self._buffers = directory.buffers(_THREADS)
        self._threads = StartedThreads(_THREADS - 1, name)

    def write(self, calls: Sequence[Sequence[SlotRun]]) -> dict[int, BaseException]:
        """Write the runs of each call. Return the first error of each failed call, by the call's place in ``calls``.

        Blocks the caller until no thread uses the buffers of any run.
        """
        batch = _Batch(self._directory, self._buffers)
        for place, call in enumerate(calls):
            for run in call:
                (batch.direct if self._directory.is_direct(run) else batch.cached).append((place, run))
        direct = sum(len(run.keys) for _, run in batch.direct)
        if self._directory.is_long(direct, _LEAST_LONG_RUNS):
            batch.write_directly(self._threads, min(len(batch.direct), _THREADS) - 1)
        # All direct writes have ended, as they must before cached writes begin, see BlockFile.
        batch.cached += batch.direct  # what is left here was too little for direct writes
        batch.write_cached()
        return batch.errors

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


class _Batch:
    """Runs to write past the page cache (``direct``) or through it (``cached``), each with the place of its call.

    ``errors``: the first error of each failed call, by the call's place. The later runs of such a call are left out.
    """

    def __init__(self, directory: SsdDirectory, buffers: RunBuffers) -> None:
        self.direct: deque[tuple[int, SlotRun]] = deque()
        self.cached: deque[tuple[int, SlotRun]] = deque()
        self.errors: dict[int, BaseException] = {}
        self._directory = directory
        self._buffers = buffers

    def write_directly(self, threads: StartedThreads, count: int) -> None:
        """Write the direct runs, in the caller's thread and ``count`` others. Add refused runs to ``cached``."""
        ended, started = threading.Semaphore(0), 0
        try:
            for _ in range(count):
                threads.submit(partial(self._write_in_thread, ended))
                started += 1
            self._write_some()
        finally:
            for _ in range(started):
                ended.acquire()

    def write_cached(self) -> None:
        """Write the cached runs in the caller's thread, since more threads would not be faster."""
        if self.cached:
            with self._buffers.take() as buffer:
                for place, run in self.cached:
                    self._write(place, run, buffer, direct=False)

    def _write_in_thread(self, ended: threading.Semaphore) -> None:
        try:
            self._write_some()
        finally:
            ended.release()

    def _write_some(self) -> None:
        """Write direct runs until none is left."""
        with self._buffers.take() as buffer:
            while True:
                try:
                    place, run = self.direct.popleft()
                except IndexError:
                    return
                self._write(place, run, buffer, direct=True)

    def _write(self, place: int, run: SlotRun, buffer: RunBuffer, *, direct: bool) -> None:
        if place not in self.errors:
            try:
                if not self._directory.write(run, buffer, direct=direct):
                    self.cached.append((place, run))
            except BaseException as error:
                self.errors.setdefault(place, error)
