"""Append-only logs: each change is written before the caller that makes the change continues.

A kill of the process loses no written record, since the kernel has it. A power cut may lose the last ones, since
appending does not wait for the disk; rewriting a file does. A file is full at 64 MiB. When removed items make up half
of a full file, the file is rewritten without them. So a log has at most about twice the size of its live items, plus
one file.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread

from slime_journal.record_files import Header, LogDirectory, LogFile, LogFiles, LogKind
from slime_journal.record_frames import Torn

__all__ = ["RecordLog"]

logger = logging.getLogger(__name__)

_FILE_BYTES = 64 << 20
_TRY_AGAIN_S = 60.0


class RecordLog:
    """The log of this ``kind`` in ``directory``. Raises StartupError when another router uses it, or on an OSError.

    ``reader``: names what the records depend on, such as a tokenizer; files of another reader are refused.
    Call :meth:`replay` first, then :meth:`append` any number of times, with :meth:`tidy` in the background.
    """

    def __init__(
        self, directory: LogDirectory, kind: LogKind, reader: str, file_bytes: int = _FILE_BYTES
    ) -> None:
        self.files: list[LogFile] = []
        self._directory = directory
        self._kind = kind
        self._disk = LogFiles(directory, kind, reader)
        self._file_bytes = file_bytes
        self._next = 1
        self._fd = self._lock = -1
        self._news: anyio.Event | None = None
        path = directory.path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / f"{kind.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise directory.refused(f"wanted a directory, got {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise directory.refused(f"another router writes to {path}") from None
        directory.logs.append(self.files)

    def close(self) -> None:
        """Close the files; nothing can be written any more."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    @property
    def is_given_up(self) -> bool:
        """True after a write to the directory has failed: nothing more is written."""
        return self._directory.failed is not None

    def number(self) -> int:
        """Return a serial for an item that the next :meth:`append` adds."""
        self._next += 1
        return self._next - 1

    # Reading, once.

    def replay(self, take: Callable[[Any], None]) -> None:
        """Call ``take`` with the records in order, and open the log for writing. On any error the log is closed.

        An item whose parent a rewrite has left out is skipped. If no later record removes that item, the log is
        refused.
        """
        there: set[int] = set()
        orphans: dict[int, LogFile] = {}

        def visit(record: Any) -> None:
            if isinstance(record, self._kind.adds):
                self._count(record)
                if record.parent and record.parent not in there:
                    orphans[record.serial] = self.files[-1]
                    return
                there.add(record.serial)
            elif isinstance(record, self._kind.removes):
                if record.serial in there or record.serial in orphans:
                    self._count(record)
                there.discard(record.serial)
                orphans.pop(record.serial, None)
            elif isinstance(record, Header):
                return
            take(record)

        try:
            with _no_collector():
                self._read_all(visit)
            if orphans:
                file = next(iter(orphans.values()))
                self._disk.refuse(file.path, f"has the first of {len(orphans)} records without their parent")
        except BaseException:
            self.close()
            raise

    def _read_all(self, visit: Callable[[Any], None]) -> None:
        try:
            found = self._disk.found()
            for file in found:
                self.files.append(file)
                self._next = max(self._next, file.first)  # all earlier items may have been removed
                for record in self._disk.records(file, is_last=file is found[-1]):
                    visit(record)
            if found:
                self._fd = _opened(found[-1])
            else:
                self._begin_file(1)
        except OSError as error:
            raise self._directory.refused(f"{error.filename}: {error.strerror}") from None

    # Writing.

    def append(self, records: Sequence[Any]) -> None:
        """Write ``records`` in one piece. After a failure nothing more is written to any log of the directory."""
        if self._directory.failed is not None:
            return
        file = self.files[-1]
        pieces = self._disk.frame(records)
        length = sum(map(len, pieces))
        try:
            written = os.writev(self._fd, pieces)
            if written < length:
                os.ftruncate(self._fd, file.size_bytes)
                raise OSError(0, f"{written} of {length} bytes were written")
            file.size_bytes += length
            for record in records:
                self._count(record)
            if file.size_bytes >= self._file_bytes:
                self._begin_file(file.number + 1)
        except OSError as error:
            self._directory.failed = str(error.strerror)
            logger.error(
                "nothing more is written to the logs in %s, so later changes will not survive the process: %s",
                self._directory.path,
                error,
            )

    def _begin_file(self, number: int) -> None:
        file = LogFile(self._disk.path(number), number, self._next)
        self._disk.write(file, [])
        fd = _opened(file)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self.files.append(file)
        self._wake_tidy()

    def _count(self, record: Any) -> None:
        if isinstance(record, self._kind.adds):
            self.files[-1].size += record.size
            self._next = max(self._next, record.serial + 1)
        elif isinstance(record, self._kind.removes):
            file = _file_of(record.serial, self.files)
            file.dead.add(record.serial)
            file.dead_size += record.size
            if file.half_dead and file is not self.files[-1]:
                self._wake_tidy()

    def _wake_tidy(self) -> None:
        if self._news is not None:
            self._news.set()

    # Rewriting.

    async def tidy(self, is_needed: Callable[[Any], bool]) -> None:
        """Rewrite half-dead files. End after a failed write, since then it is unknown which records are needed.

        ``is_needed`` is called in a thread. It decides on records that neither add nor remove an item, and on removals
        of items that no file has.
        """
        while self._directory.failed is None:
            self._news = anyio.Event()
            run = self._due()
            if not run:
                await self._news.wait()
                continue
            files = list(self.files)
            try:
                fresh, dropped = await anyio.to_thread.run_sync(self._rewrite, run, files, is_needed)
            except (OSError, Torn) as error:
                logger.error("removed records stay in %s, which cannot be rewritten: %s", run[-1].path, error)
                await anyio.sleep(_TRY_AGAIN_S)
                continue
            for file in run:
                fresh.size += file.size
                fresh.dead_size += file.dead_size
                fresh.dead |= file.dead
            fresh.dead -= dropped.keys()
            fresh.size -= sum(dropped.values())
            fresh.dead_size -= sum(dropped.values())
            place = self.files.index(run[0])
            self.files[place : place + len(run)] = [fresh]

    def _due(self) -> list[LogFile]:
        """Return the files to rewrite as one; an empty list if no full file is half-dead.

        These are the first half-dead file, and as many of the files before it as fit: the live records of all these
        files take at most half the size of a full file. The file that is being written is never among them.
        """
        for place, file in enumerate(self.files[:-1]):
            if file.half_dead:
                begin, size = place, file.live_bytes
                while begin and size + self.files[begin - 1].live_bytes <= self._file_bytes // 2:
                    begin -= 1
                    size += self.files[begin].live_bytes
                return self.files[begin : place + 1]
        return []

    def _rewrite(
        self, run: Sequence[LogFile], files: Sequence[LogFile], is_needed: Callable[[Any], bool]
    ) -> tuple[LogFile, dict[int, int]]:
        """Rewrite ``run`` as one file. Return the file, and the sizes of the items left out, by serial.

        ``files``: all files. The removal of an item stays as long as some file has the item. Thread-safe: changes no
        LogFile.
        """
        dropped: dict[int, int] = {}

        def stays(record: Any) -> bool:
            if isinstance(record, self._kind.adds):
                if record.serial not in _file_of(record.serial, files).dead:
                    return True
                dropped[record.serial] = record.size
                return False
            if not isinstance(record, self._kind.removes):
                return is_needed(record)
            there = record.serial in _file_of(record.serial, files).dead and record.serial not in dropped
            return there or is_needed(record)

        return self._disk.rewrite(run, stays), dropped


def _opened(file: LogFile) -> int:
    return os.open(file.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Pause the garbage collector: it would take a third of the time of reading, and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()


def _file_of(serial: int, files: Sequence[LogFile]) -> LogFile:
    """Return the file to which the item ``serial`` belongs. The item may have been left out by a rewrite."""
    return files[max(bisect_right(files, serial, key=lambda file: file.first) - 1, 0)]
