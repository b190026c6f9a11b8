"""The files of a log: their names, headers and records."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from router_core.errors import StartupError
from slime_journal.record_frames import Damaged, Frames, Torn

__all__ = ["Header", "LogDirectory", "LogFile", "LogFiles", "LogKind"]

logger = logging.getLogger(__name__)

_HEADER_BYTES = 4096


@dataclass(frozen=True)
class LogKind:
    """The format of a log: the kinds of its records, which are NamedTuples, and the names of its files.

    ``adds``: kinds of records that add an item. Each has the ``serial`` and ``size`` of the item, and as ``parent`` the
    serial of the item that this item depends on (0: none). ``removes``: the kind of records that remove an item; each
    has the ``serial`` and ``size`` of the item. ``others``: kinds that neither add nor remove an item. ``name``: the
    suffix of the files. ``foreign``: what a file with another ``reader`` (see Header) has, in the words of an error
    message. ``what_to_move``: the files that a user moves away to start without the log; "" for the whole directory.
    """

    name: str
    format: str
    adds: tuple[type[Any], ...]
    removes: type[Any]
    others: tuple[type[Any], ...]
    foreign: str
    what_to_move: str = ""


class LogDirectory:
    """The directory of one router's logs, set by ``flag``. Plugins share it as the component ``"log_directory"``.

    ``failed``: the reason why writing stopped, or None. Writing stops for all logs, since they refer to one another.
    ``logs``: the files of each log.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path
        self.flag = flag
        self.failed: str | None = None
        self.logs: list[list[LogFile]] = []

    def as_dict(self) -> dict[str, Any]:
        """Return the number of files, their bytes, and the reason of a failure, if any."""
        return {
            "files": sum(map(len, self.logs)),
            "bytes": sum(file.size_bytes for files in self.logs for file in files),
            "failed": self.failed,
        }

    def refused(self, why: str) -> StartupError:
        """Return an error that says ``why`` the router cannot start with this directory."""
        return StartupError(f"{self.flag}: {why}")


class Header(NamedTuple):
    """The first record of a file. The serials of the file's items begin at ``first``.

    ``reader``: names what the records depend on, such as a tokenizer; a log with another reader refuses the file.
    The file replaces the files with the numbers from ``oldest`` to its own, which were rewritten into it. ``oldest`` is
    the number of the file itself if there was no rewrite.
    """

    format: str
    oldest: int
    first: int
    reader: str


@dataclass(slots=True)
class LogFile:
    """A file, with ``oldest`` and ``first`` of its header. ``dead``: serials of removed items that the file still has.

    ``size``: the sum of the sizes of all items in the file. ``dead_size``: the same sum over the removed items.
    ``size_bytes``: bytes of the file.
    """

    path: Path
    oldest: int
    first: int
    size_bytes: int = 0
    size: int = 0
    dead_size: int = 0
    dead: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return _number(self.path)

    @property
    def half_dead(self) -> bool:
        """True when removed items make up at least half of the size of all items."""
        return bool(self.dead) and 2 * self.dead_size >= self.size

    @property
    def live_bytes(self) -> int:
        """Estimated size of the file after a rewrite, in bytes."""
        return self.size_bytes * (self.size - self.dead_size) // max(self.size, 1)


class LogFiles:
    """Reads and writes the files of one log. Unreadable files raise StartupError, which says what to do."""

    def __init__(self, directory: LogDirectory, kind: LogKind, reader: str) -> None:
        self._directory = directory
        self._kind = kind
        self._reader = reader
        self._frames = Frames((Header, *kind.adds, kind.removes, *kind.others))
        self.frame = self._frames.write

    def path(self, number: int) -> Path:
        """Return the path of file ``number``, existing or not."""
        return self._directory.path / f"{number:08}.{self._kind.name}"

    def found(self) -> list[LogFile]:
        """Return the existing files, oldest first. Remove files that were rewritten into a later file."""
        directory = self._directory.path
        for left in directory.glob(f"*.{self._kind.name}.tmp"):
            left.unlink()  # its write was interrupted
        name = re.compile(rf"\d{{8}}\.{self._kind.name}")
        there = [path for path in directory.iterdir() if name.fullmatch(path.name)]
        files: list[LogFile] = []
        until = 0
        for path in sorted(there, reverse=True):
            if files and _number(path) >= until:
                path.unlink()
                continue
            if files and _number(path) != until - 1:
                break
            header = self._header(path)
            files.append(LogFile(path, header.oldest, header.first))
            until = header.oldest
        if until > 1:
            missing = self.path(until - 1)
            raise self._directory.refused(
                f"{missing} is missing; move the later files away to start without them"
            )
        return files[::-1]

    def _header(self, path: Path) -> Header:
        with path.open("rb") as file:
            beginning = file.read(_HEADER_BYTES)
        try:
            _, _, [header] = next(self._frames.read(memoryview(beginning)))
        except (Torn, StopIteration):
            self.refuse(path, "is damaged at byte 0")
        if not isinstance(header, Header) or header.format != self._kind.format:
            self.refuse(path, "is not a log of this version")
        if header.reader != self._reader:
            self.refuse(path, f"has {self._kind.foreign}")
        return header

    def records(self, file: LogFile, *, is_last: bool) -> Iterator[Any]:
        """Yield all records of ``file``. Drop an incomplete record, left by a kill, at the end of the last file."""
        try:
            for _, end, records in self._frames.read(memoryview(file.path.read_bytes())):
                yield from records
                file.size_bytes = end
        except Torn as torn:
            if isinstance(torn, Damaged) or not is_last:
                self.refuse(file.path, f"is damaged at byte {torn.offset}")
            logger.warning("%s: dropped the incomplete last record, which no client relies on", file.path)
            os.truncate(file.path, torn.offset)

    def write(self, file: LogFile, content: Sequence[bytes | memoryview]) -> None:
        """Write all of ``file`` atomically. Raises OSError."""
        new = file.path.with_suffix(f"{file.path.suffix}.tmp")
        header = self.frame([Header(self._kind.format, file.oldest, file.first, self._reader)])
        try:
            with open(new, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
                out.writelines([*header, *content])
                out.flush()
                if content:
                    os.fsync(out.fileno())  # else a power cut could lose the records of the replaced files
                file.size_bytes = out.tell()
            new.replace(file.path)
        except OSError:
            new.unlink(missing_ok=True)  # the disk may be full
            raise

    def rewrite(self, run: Sequence[LogFile], stays: Callable[[Any], bool]) -> LogFile:
        """Replace ``run`` by one file with the records that stay, and return it. Raises OSError and Torn."""
        content: list[bytes | memoryview] = []
        for file in run:
            data = memoryview(file.path.read_bytes())
            for start, end, records in self._frames.read(data):
                needed = [record for record in records if not isinstance(record, Header) and stays(record)]
                if len(needed) == len(records):
                    content.append(data[start:end])
                elif needed:
                    content += self.frame(needed)
        fresh = LogFile(run[-1].path, run[0].oldest, run[0].first)
        self.write(fresh, content)
        for file in run[:-1]:
            file.path.unlink()
        return fresh

    @property
    def _to_move(self) -> Path:
        return self._directory.path / self._kind.what_to_move

    def refuse(self, path: Path, why: str) -> NoReturn:
        """Raise StartupError: the file ``path`` cannot be used, for the reason ``why``."""
        raise self._directory.refused(f"{path} {why}; move {self._to_move} away to start without its records")


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])
