"""Group commit: one thread orders the writes and removals of a directory, so that many blocks share each wait.

A removal frees the slot of a block. A wait ends when the written bytes are on the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress

from slime_tiered_store.tiers.ssd.directory import SsdDirectory
from slime_tiered_store.tiers.ssd.index_log import FREE, HELD
from slime_tiered_store.tiers.ssd.runs import SlotRun
from slime_tiered_store.tiers.ssd.writers import Writers

__all__ = ["Committer", "Write"]

logger = logging.getLogger(__name__)

#: The blocks of one call.
Write = Sequence[SlotRun]


class Committer:
    """Writes blocks to a directory. Blocks of calls that come while a batch is written are in the next batch.

    A batch has three steps, and each of them waits for the device: record the slots that become free, write the blocks,
    record the blocks. A step without work is left out. So at any moment the index names only slots whose blocks are
    complete on the device.

    A process that ends without :meth:`close` still waits for all calls, since the thread is one of a
    ``ThreadPoolExecutor``. This is needed: a block whose removal was not recorded would come back. The constructor
    raises OSError, RuntimeError and MemoryError.
    """

    def __init__(self, directory: SsdDirectory, name: str) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._writers = Writers(directory, f"{name}-blocks")
        try:
            self._thread.submit(int).result()  # starts the thread, which the system could refuse later
        except BaseException:
            self._thread.shutdown()
            self._writers.close()
            raise
        self._lock = threading.Lock()
        self._writes: list[tuple[Write, Future[None]]] = []
        self._free: list[SlotRun] = []

    def write(self, runs: Write) -> Future[None]:
        """Start to write blocks. The future ends when they are on the device, or with an error, such as an OSError."""
        done: Future[None] = Future()
        with self._lock:  # which the commit takes, too
            self._thread.submit(
                self._commit
            )  # first: if it raises, no later commit may use the caller's memory
            self._writes.append((runs, done))
        return done

    def free(self, runs: Sequence[SlotRun]) -> None:
        """Free those slots of ``runs`` that still hold the given keys: at once for readers, and soon on the device."""
        table = self._directory.log.table
        freed: list[SlotRun] = []
        for run in runs:
            if not table.missing(run):
                freed.append(run)
            else:
                blocks = enumerate(run.keys, run.slot)
                freed += [SlotRun(slot, [key], []) for slot, key in blocks if table.key(slot) == key]
        for run in freed:
            table.apply(FREE, run.slot, b"".join(run.keys))
        if freed:
            with self._lock:
                self._free += freed
            self._thread.submit(self._commit)

    def close(self) -> None:
        """Wait for all calls, and end the threads. Blocks the caller."""
        if self._free:  # an earlier attempt to record these slots may have failed
            self._thread.submit(self._commit)
        self._thread.shutdown()
        self._writers.close()

    def _commit(self) -> None:
        with self._lock:
            writes, self._writes = self._writes, []
            freed, self._free = self._free, []
        try:
            writes = [each for each in writes if each[1].set_running_or_notify_cancel()]
            log = self._directory.log
            runs = [run for each, _ in writes for run in each]
            held = [block for run in runs for block in log.table.held(run.slot, run.slot + len(run.keys))]
            free = freed + [SlotRun(slot, [key], []) for slot, key in held]  # these slots get other blocks
            if log.needs_rewrite:
                log.rewrite()
            if free:
                log.append(FREE, free)
                freed.clear()
            written = self._write(writes)
            if written:
                self._directory.sync()
                log.append(HELD, [run for each, _ in written for run in each])
        except BaseException as error:  # a bug in this code must reach the callers, too
            for _, done in writes:
                with suppress(InvalidStateError):  # the future has an error already, or was cancelled
                    done.set_exception(error)
            with self._lock:
                self._free[:0] = freed
            if not writes:
                logger.error("%s: the removal of blocks is not recorded yet: %s", self._directory.path, error)
        else:
            for _, done in written:
                done.set_result(None)

    def _write(self, writes: Sequence[tuple[Write, Future[None]]]) -> list[tuple[Write, Future[None]]]:
        """Write the blocks of each call. Return the calls without an error. Set the error in the others' futures."""
        errors = self._writers.write([runs for runs, _ in writes])
        for place, error in errors.items():
            writes[place][1].set_exception(error)
        return [each for place, each in enumerate(writes) if place not in errors]
