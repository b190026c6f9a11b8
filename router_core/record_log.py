"""Logs: files to which each change is appended before whoever made it goes on.

What was written stays when the process is killed: it is the kernel's by then. Only a power cut can take it, for no
answer waits for a disk. A file is full at 64 MiB, and is written again without what has gone when that is half of what
it has; so a log has about twice what is kept, and one file.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import anyio
import anyio.to_thread

from router_core.errors import StartupError
from router_core.record_frames import Damaged, Frames, Torn

__all__ = ["LogDirectory", "LogKind", "RecordLog"]

logger = logging.getLogger(__name__)

_FILE_BYTES = 64 << 20
_HEADER_BYTES = 4096
_TRY_AGAIN_S = 60.0


class Header(NamedTuple):
    """The first record of a file: its things are numbered from ``first``, and mean something to ``reader`` alone.

    It has all of the log since the beginning of file ``oldest``: earlier ones may have been written again into it.
    """

    format: str
    oldest: int
    first: int
    reader: str


@dataclass(frozen=True)
class LogKind:
    """What there is in a log. Records are NamedTuples.

    ``adds``: kinds of records of a thing that is there from then on, with a ``serial``, the serial of the ``parent``
    without which it cannot be (0: none), and a ``size``. ``removes``: the kind that tells that ``serial``, of that
    ``size``, has gone. ``others``: kinds that have no such meaning here.
    ``name`` is how its files end. ``foreign``: what they have when they were written for another reader.
    ``what_to_move``: the files to be moved away to begin without all of it, "" for the directory.
    """

    name: str
    format: str
    adds: tuple[type[Any], ...]
    removes: type[Any]
    others: tuple[type[Any], ...]
    foreign: str
    what_to_move: str = ""


class LogDirectory:
    """Where the logs of one router are, as ``flag`` said. Plugins share it as the component ``"log_directory"``."""

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path
        self.flag = flag
        self.logs: list[RecordLog] = []

    def as_dict(self) -> dict[str, Any]:
        """How much it is, and why nothing more is written to some log of it (None: it is)."""
        return {
            "files": sum(log.files for log in self.logs),
            "bytes": sum(log.size_bytes for log in self.logs),
            "failed": next((log.failed for log in self.logs if log.failed is not None), None),
        }


@dataclass(slots=True)
class _File:
    """``oldest`` and ``first`` as in its header. ``dead``: things that are still in it, and gone."""

    path: Path
    oldest: int
    first: int
    size_bytes: int = 0
    size: int = 0
    dead_size: int = 0
    dead: set[int] = field(default_factory=set)

    @property
    def half_dead(self) -> bool:
        return bool(self.dead) and 2 * self.dead_size >= self.size

    @property
    def live_bytes(self) -> int:
        """About how long it will be when it has been written again."""
        return self.size_bytes * (self.size - self.dead_size) // max(self.size, 1)


class RecordLog:
    """The log of this ``kind`` in ``directory``. Raises StartupError when another router has it.

    ``reader``: what it takes to understand it; who gives another one cannot read it.
    To be used as: :meth:`replay`, :meth:`append` any number of times, and :meth:`tidy` in the background.
    """

    def __init__(
        self, directory: LogDirectory, kind: LogKind, reader: str, file_bytes: int = _FILE_BYTES
    ) -> None:
        self.failed: str | None = None
        self._directory = directory.path
        self._flag = directory.flag
        self._kind = kind
        self._frames = Frames((Header, *kind.adds, kind.removes, *kind.others))
        self._reader = reader
        self._file_bytes = file_bytes
        self._files: list[_File] = []
        self._next = 1
        self._fd = self._lock = -1
        self._news: anyio.Event | None = None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._directory / f"{kind.name}.lock"
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._refused(f"{self._directory}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise self._refused(f"another router writes to {self._directory}") from None
        directory.logs.append(self)

    def close(self) -> None:
        """Let go of the files; nothing is written any more."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    @property
    def files(self) -> int:
        """How many there are."""
        return len(self._files)

    @property
    def size_bytes(self) -> int:
        """Length of all files."""
        return sum(file.size_bytes for file in self._files)

    def number(self) -> int:
        """A serial for a thing, which the next :meth:`append` is to tell of."""
        self._next += 1
        return self._next - 1

    # Reading, once.

    def replay(self, take: Callable[[Any], None]) -> None:
        """Call ``take`` with all that was written, in order; then more can be. Raises StartupError, and closes it.

        Things whose parent was left out when a file was written again are not told: they have gone, too.
        """
        there: set[int] = set()
        orphans: set[int] = set()

        def tell(record: Any) -> None:
            if isinstance(record, self._kind.adds):
                self._count(record)
                if record.parent and record.parent not in there:
                    orphans.add(record.serial)
                    return
                there.add(record.serial)
            elif isinstance(record, self._kind.removes):
                if record.serial in there or record.serial in orphans:
                    self._count(record)
                there.discard(record.serial)
                orphans.discard(record.serial)
            elif isinstance(record, Header):
                return
            take(record)

        try:
            with _no_collector():
                self._replay(tell)
            if orphans:
                raise self._refused(f"{len(orphans)} records go on from what is not there")
        except BaseException:
            self.close()
            raise

    def _replay(self, take: Callable[[Any], None]) -> None:
        try:
            for left in self._directory.glob(f"*.{self._kind.name}.tmp"):
                left.unlink()  # it was being written
            paths = self._whole()
            for path in paths:
                self._read(path, take, is_last=path is paths[-1])
            if paths:
                self._fd = self._opened(paths[-1])
            else:
                self._begin_file(1)
        except OSError as error:
            raise self._refused(f"{error.filename}: {error.strerror}") from None

    def _whole(self) -> list[Path]:
        """The files, oldest first; those that were written again into a later one are removed."""
        found: list[Path] = []
        until = 0
        name = re.compile(rf"\d{{8}}\.{self._kind.name}")
        there = [path for path in self._directory.iterdir() if name.fullmatch(path.name)]
        for path in sorted(there, reverse=True):
            if found and _number(path) >= until:
                path.unlink()
                continue
            if found and _number(path) != until - 1:
                break
            found.append(path)
            until = self._header(path).oldest
        if until > 1:
            raise self._refused(
                f"{self._path(until - 1)} is missing; move the files behind it away to start without"
            )
        return found[::-1]

    def _header(self, path: Path) -> Header:
        with path.open("rb") as file:
            beginning = file.read(_HEADER_BYTES)
        try:
            _, _, [header] = next(self._frames.read(memoryview(beginning)))
        except (Torn, StopIteration):
            self._damaged(path, 0)
        if not isinstance(header, Header) or header.format != self._kind.format:
            raise self._refused(f"{path} is no log of this version")
        if header.reader != self._reader:
            raise self._refused(f"{path} has {self._kind.foreign}; move {self._to_move} away")
        return header

    def _read(self, path: Path, take: Callable[[Any], None], *, is_last: bool) -> None:
        header = self._header(path)
        file = _File(path, header.oldest, header.first)
        self._files.append(file)
        self._next = max(self._next, header.first)  # all that was numbered before may be gone
        try:
            for _, end, records in self._frames.read(memoryview(path.read_bytes())):
                for record in records:
                    take(record)
                file.size_bytes = end
        except Torn as torn:
            if isinstance(torn, Damaged) or not is_last:
                self._damaged(path, torn.offset)
            logger.warning("%s: dropped the last record: it has no end, so nobody was told of it", path)
            os.truncate(path, torn.offset)

    # Writing.

    def append(self, records: Sequence[Any]) -> None:
        """Write ``records`` in one piece. When that fails nothing more is written, and ``failed`` says why."""
        if self.failed is not None:
            return
        file = self._files[-1]
        pieces = self._frames.write(records)
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
                self._begin_file(_number(file.path) + 1)
        except OSError as error:
            self.failed = str(error.strerror)
            logger.error(
                "the log of %s is given up, what comes is lost with the process: %s", self._kind.name, error
            )

    def _begin_file(self, number: int) -> None:
        file = _File(self._path(number), number, self._next)
        self._write_new(file, [])
        fd = self._opened(file.path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._files.append(file)
        self._tell()

    def _write_new(self, file: _File, content: Sequence[bytes | memoryview]) -> None:
        """Write all of ``file``, which is there in whole or not at all."""
        new = file.path.with_suffix(f"{file.path.suffix}.tmp")
        header = self._frames.write([Header(self._kind.format, file.oldest, file.first, self._reader)])
        try:
            with open(new, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
                out.writelines([*header, *content])
                out.flush()
                if content:
                    os.fsync(out.fileno())  # what it replaces was on the disk long ago
                file.size_bytes = out.tell()
            new.replace(file.path)
        except OSError:
            new.unlink(missing_ok=True)  # the disk may be full
            raise

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08}.{self._kind.name}"

    def _opened(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _count(self, record: Any) -> None:
        if isinstance(record, self._kind.adds):
            self._files[-1].size += record.size
            self._next = max(self._next, record.serial + 1)
        elif isinstance(record, self._kind.removes):
            file = _file_of(record.serial, self._files)
            file.dead.add(record.serial)
            file.dead_size += record.size
            if file.half_dead and file is not self._files[-1]:
                self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()

    # Writing again.

    async def tidy(self, is_needed: Callable[[Any], bool]) -> None:
        """Write files again that are half dead, for ever.

        ``is_needed``: whether a record still has a meaning that adds nothing, or tells of what is not in any file. It
        is called in a thread.
        """
        while True:
            self._news = anyio.Event()
            run = self._due()
            if not run:
                await self._news.wait()
                continue
            files = list(self._files)
            try:
                fresh, dropped = await anyio.to_thread.run_sync(self._rewrite, run, files, is_needed)
            except (OSError, Torn) as error:
                logger.error("%s cannot be written again, and is too long: %s", run[-1].path, error)
                await anyio.sleep(_TRY_AGAIN_S)
                continue
            for file in run:
                fresh.size += file.size
                fresh.dead_size += file.dead_size
                fresh.dead |= file.dead
            fresh.dead -= dropped.keys()
            fresh.size -= sum(dropped.values())
            fresh.dead_size -= sum(dropped.values())
            place = self._files.index(run[0])
            self._files[place : place + len(run)] = [fresh]

    def _due(self) -> list[_File]:
        """A file that is half dead, behind those before it with which it makes half of one at most."""
        for place, file in enumerate(self._files[:-1]):
            if file.half_dead:
                begin, size = place, file.live_bytes
                while begin and size + self._files[begin - 1].live_bytes <= self._file_bytes // 2:
                    begin -= 1
                    size += self._files[begin].live_bytes
                return self._files[begin : place + 1]
        return []

    def _rewrite(
        self, run: Sequence[_File], files: Sequence[_File], is_needed: Callable[[Any], bool]
    ) -> tuple[_File, dict[int, int]]:
        """One file instead of ``run``, and the sizes of the things left out. In a thread: it only reads sets.

        ``files`` are all. That a thing has gone is told as long as some file has it.
        """
        dropped: dict[int, int] = {}

        def stays(record: Any) -> bool:
            if isinstance(record, self._kind.adds):
                if record.serial not in _file_of(record.serial, files).dead:
                    return True
                dropped[record.serial] = record.size
                return False
            if isinstance(record, self._kind.removes):
                there = record.serial in _file_of(record.serial, files).dead and record.serial not in dropped
                return there or is_needed(record)
            return not isinstance(record, Header) and is_needed(record)

        content: list[bytes | memoryview] = []
        for file in run:
            data = memoryview(file.path.read_bytes())
            for start, end, records in self._frames.read(data):
                needed = [record for record in records if stays(record)]
                if len(needed) == len(records):
                    content.append(data[start:end])
                elif needed:
                    content += self._frames.write(needed)
        fresh = _File(run[-1].path, run[0].oldest, run[0].first)
        self._write_new(fresh, content)
        for file in run[:-1]:
            file.path.unlink()
        return fresh, dropped

    # Refusing.

    @property
    def _to_move(self) -> Path:
        return self._directory / self._kind.what_to_move

    def _refused(self, why: str) -> StartupError:
        return StartupError(f"{self._flag}: {why}")

    def _damaged(self, path: Path, offset: int) -> NoReturn:
        raise self._refused(
            f"{path} is damaged at byte {offset}; move {self._to_move} away to start without what it has"
        )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Nothing of what is read can be thrown away; looking for it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()


def _file_of(serial: int, files: Sequence[_File]) -> _File:
    """The file in which thing ``serial`` is, or would be."""
    return files[max(bisect_right(files, serial, key=lambda file: file.first) - 1, 0)]


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])
