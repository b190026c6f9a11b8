"""The log of trajectories: files to which each change is appended before a client hears of it.

What was written stays when the process is killed: it is the kernel's by then. Only a power cut can take it, for no
answer waits for a disk. A file is full at 64 MiB, and is written again without what has gone when that is
half of its tokens; so the log has about twice what is kept, and one file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import anyio
import anyio.to_thread

from router_core.errors import StartupError
from router_core.types import Tokenizer
from slime_radix_cache.log_records import (
    Answered,
    Asked,
    Damaged,
    Gone,
    Header,
    Record,
    Torn,
    frame,
    frames,
)

__all__ = ["TrajectoryLog", "fingerprint"]

logger = logging.getLogger(__name__)

_FORMAT = "slime-router trajectories 1"
_FILE_BYTES = 64 << 20
_HEADER_BYTES = 4096
_TRY_AGAIN_S = 60.0
_SAMPLE = "def f(x): return 1234567 * x  # The quick brown fox, 敏捷的狐狸, быстрая лиса. <|im_end|>\n"
_NAME = re.compile(r"\d{8}\.trajectories")


@dataclass(slots=True)
class _File:
    """``oldest`` and ``first`` as in its header. ``dead``: segments that are still in it, and gone."""

    path: Path
    oldest: int
    first: int
    size_bytes: int = 0
    tokens: int = 0
    dead_tokens: int = 0
    dead: set[int] = field(default_factory=set)

    @property
    def half_dead(self) -> bool:
        return bool(self.dead) and 2 * self.dead_tokens >= self.tokens

    @property
    def live_bytes(self) -> int:
        """About how long it will be when it has been written again."""
        return self.size_bytes * (self.tokens - self.dead_tokens) // max(self.tokens, 1)


class TrajectoryLog:
    """The log in ``directory``. Raises StartupError when another router has it.

    ``tokenizer``: whose ids these are. To be used as: :meth:`replay`, :meth:`append` any number of times, and
    :meth:`tidy` in the background.
    """

    def __init__(self, directory: Path, tokenizer: str, file_bytes: int = _FILE_BYTES) -> None:
        self.failed: str | None = None
        self._directory = directory
        self._tokenizer = tokenizer
        self._file_bytes = file_bytes
        self._files: list[_File] = []
        self._next = 1
        self._fd = -1
        self._news: anyio.Event | None = None
        lock = directory / "trajectories.lock"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"--trajectory-log: {directory}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise StartupError(f"--trajectory-log: another router writes to {directory}") from None

    def close(self) -> None:
        """Let go of the directory; nothing is written any more."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def as_dict(self) -> dict[str, Any]:
        """How much it is, and why nothing more is written (None: it is)."""
        return {
            "files": len(self._files),
            "bytes": sum(file.size_bytes for file in self._files),
            "failed": self.failed,
        }

    def number(self) -> int:
        """A number for a segment, which the next :meth:`append` is to tell of."""
        self._next += 1
        return self._next - 1

    # Reading, once.

    def replay(self, take: Callable[[Record], None]) -> None:
        """Call ``take`` with all that was written, in order; then more can be. Raises StartupError."""
        present: set[int] = set()
        try:
            for left in self._directory.glob("*.trajectories.tmp"):
                left.unlink()  # it was being written
            paths = self._whole()
            for path in paths:
                self._read(path, take, present, is_last=path is paths[-1])
            if paths:
                self._fd = self._opened(paths[-1])
            else:
                self._begin_file(1)
        except OSError as error:
            raise StartupError(f"--trajectory-log: {error.filename}: {error.strerror}") from None

    def _whole(self) -> list[Path]:
        """The files, oldest first; those that were written again into a later one are removed."""
        found: list[Path] = []
        until = 0
        names = (path.name for path in self._directory.iterdir() if _NAME.fullmatch(path.name))
        for name in sorted(names, reverse=True):
            path = self._directory / name
            if found and _number(path) >= until:
                path.unlink()
                continue
            if found and _number(path) != until - 1:
                break
            found.append(path)
            until = self._header(path).oldest
        if until > 1:
            raise StartupError(
                f"--trajectory-log: {self._path(until - 1)} is missing; move the files behind it away to start without"
            )
        return found[::-1]

    def _header(self, path: Path) -> Header:
        with path.open("rb") as file:
            beginning = file.read(_HEADER_BYTES)
        try:
            _, _, [header] = next(frames(memoryview(beginning)))
        except (Torn, StopIteration):
            _refuse(path, 0)
        if not isinstance(header, Header) or header.format != _FORMAT:
            raise StartupError(f"--trajectory-log: {path} is no log of this version")
        if header.tokenizer != self._tokenizer:
            raise StartupError(
                f"--trajectory-log: {path} has the tokens of another tokenizer; move the log away"
            )
        return header

    def _read(self, path: Path, take: Callable[[Record], None], present: set[int], *, is_last: bool) -> None:
        header = self._header(path)
        file = _File(path, header.oldest, header.first)
        self._files.append(file)
        try:
            for _, end, records in frames(memoryview(path.read_bytes())):
                for record in records:
                    self._replay_one(record, take, present)
                file.size_bytes = end
        except Torn as torn:
            if isinstance(torn, Damaged) or not is_last:
                _refuse(path, torn.offset)
            logger.warning("%s: dropped the last record: it has no end, so nobody was told of it", path)
            os.truncate(path, torn.offset)

    def _replay_one(self, record: Record, take: Callable[[Record], None], present: set[int]) -> None:
        if isinstance(record, Header):
            return
        take(record)
        if isinstance(record, Asked | Answered):
            present.add(record.serial)
        if not isinstance(record, Gone) or record.serial in present:
            self._count(record)
        if isinstance(record, Asked | Answered | Gone):
            self._next = max(self._next, record.serial + 1)

    # Writing.

    def append(self, records: Sequence[Record]) -> None:
        """Write ``records`` in one piece. When that fails nothing more is written, and ``failed`` says why."""
        if self.failed is not None:
            return
        file = self._files[-1]
        pieces = frame(records)
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
                "the log of trajectories is given up, what comes is lost with the process: %s", error
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
        new = file.path.with_suffix(".trajectories.tmp")
        header = frame([Header(_FORMAT, file.oldest, file.first, self._tokenizer)])
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
        return self._directory / f"{number:08}.trajectories"

    def _opened(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _count(self, record: Record) -> None:
        if isinstance(record, Asked | Answered):
            self._files[-1].tokens += _tokens(record)
        elif isinstance(record, Gone):
            file = _file_of(record.serial, self._files)
            file.dead.add(record.serial)
            file.dead_tokens += record.tokens
            if file.half_dead and file is not self._files[-1]:
                self._tell()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()

    # Writing again.

    async def tidy(self, is_kept: Callable[[str], bool]) -> None:
        """Write files again that are half dead, for ever. ``is_kept``: whether anything of a session is kept."""
        while True:
            self._news = anyio.Event()
            run = self._due()
            if not run:
                await self._news.wait()
                continue
            files = list(self._files)
            try:
                fresh, dropped = await anyio.to_thread.run_sync(self._rewrite, run, files, is_kept)
            except (OSError, Torn) as error:
                logger.error("%s cannot be written again, and is too long: %s", run[-1].path, error)
                await anyio.sleep(_TRY_AGAIN_S)
                continue
            for file in run:
                fresh.tokens += file.tokens
                fresh.dead_tokens += file.dead_tokens
                fresh.dead |= file.dead
            fresh.dead -= dropped.keys()
            fresh.tokens -= sum(dropped.values())
            fresh.dead_tokens -= sum(dropped.values())
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
        self, run: Sequence[_File], files: Sequence[_File], is_kept: Callable[[str], bool]
    ) -> tuple[_File, dict[int, int]]:
        """One file instead of ``run``, and the tokens of the segments left out. In a thread: it only reads sets.

        ``files`` are all. That a segment has gone is told as long as some file has it, and for its session's sake.
        """
        dropped: dict[int, int] = {}

        def is_needed(record: Record) -> bool:
            if isinstance(record, Asked | Answered):
                if record.serial not in _file_of(record.serial, files).dead:
                    return True
                dropped[record.serial] = _tokens(record)
                return False
            if isinstance(record, Gone):
                there = record.serial in _file_of(record.serial, files).dead and record.serial not in dropped
                return there or (record.session is not None and is_kept(record.session))
            return not isinstance(record, Header)

        content: list[bytes | memoryview] = []
        for file in run:
            data = memoryview(file.path.read_bytes())
            for start, end, records in frames(data):
                needed = [record for record in records if is_needed(record)]
                if len(needed) == len(records):
                    content.append(data[start:end])
                elif needed:
                    content += frame(needed)
        fresh = _File(run[-1].path, run[0].oldest, run[0].first)
        self._write_new(fresh, content)
        for file in run[:-1]:
            file.path.unlink()
        return fresh, dropped


def fingerprint(tokenizer: Tokenizer) -> str:
    """What tells the ids of ``tokenizer`` from those of others."""
    ids = array("i", tokenizer.encode(_SAMPLE, add_special_tokens=False))
    return f"{crc32(ids):08x}"


def _file_of(serial: int, files: Sequence[_File]) -> _File:
    """The file in which segment ``serial`` is, or would be."""
    return files[max(bisect_right(files, serial, key=lambda file: file.first) - 1, 0)]


def _tokens(record: Asked | Answered) -> int:
    return len(record.ids) // 4


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _refuse(path: Path, offset: int) -> NoReturn:
    raise StartupError(
        f"--trajectory-log: {path} is damaged at byte {offset}; move the log away to start without what it has"
    )
