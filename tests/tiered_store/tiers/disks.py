"""Disks that fail, are slow, or lose power, for the SSD tier. Blocks whose content follows from a number."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from xxhash import xxh3_128_digest

from slime_tiered_store.tier import Block
from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.tier import SsdTier

BLOCK_BYTES = 200


def open_unsynced(path: Path, flags: int, mode: int) -> int:
    """Open a file such that no write waits for the device."""
    return os.open(path, flags & ~os.O_DSYNC, mode)


#: Does not wait for the device: enough for a process that is killed, and fast.
UNSYNCED = FileOps(os_open=open_unsynced, fdatasync=lambda fd: None)


def key_of(number: int) -> bytes:
    return xxh3_128_digest(number.to_bytes(8, "little"))


def content_of(number: int, size: int = BLOCK_BYTES) -> bytes:
    return Random(number).randbytes(size)


async def put(tier: SsdTier, numbers: dict[int, int], size: int = BLOCK_BYTES) -> None:
    """Write blocks: their ids by number."""
    blocks = [Block(block_id, key_of(number)) for number, block_id in numbers.items()]
    await tier.write(blocks, [memoryview(content_of(number, size)) for number in numbers])


async def got(tier: SsdTier, number: int, block_id: int, size: int = BLOCK_BYTES) -> bytes:
    into = bytearray(size)
    await tier.read([Block(block_id, key_of(number))], [memoryview(into)])
    return bytes(into)


async def is_intact(tier: SsdTier, number: int, block_id: int) -> bool:
    return await got(tier, number, block_id) == content_of(number)


def newer_index(path: Path) -> tuple[Path, Path]:
    """The file of the index that counts, and the other one."""
    zero, one = path / "index.0", path / "index.1"
    return (zero, one) if zero.read_bytes().startswith(b"SLIMEIDX") else (one, zero)


def is_direct(fd: int) -> bool:
    """Return True if transfers bypass the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def write_any(fd: int, data: bytes, offset: int) -> None:
    """Write any number of bytes at any place, also to a file that is open for direct transfers."""
    cached = os.open(_path(fd), os.O_RDWR)
    os.pwrite(cached, data, offset)
    os.close(cached)


class Killed(Exception):
    """The process is dead: no system call is made any more."""


@dataclass
class Kill:
    """Kills the process when ``after`` bytes were written; what it wrote stays. Zeros at an end count as one byte.

    ``direct_bytes``: see ``FileOps``.
    """

    after: int
    direct_bytes: int = FileOps().direct_bytes
    written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pwritev(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            data = b"".join(pieces)
            cost = len(data.rstrip(b"\0")) + 1
            left = max(0, self.after - self.written)
            write_any(fd, data if left >= cost else data[:left], offset)
            self.written += cost
            if left < cost:
                raise Killed
            return len(data)

    def fdatasync(self, fd: int) -> None:
        if self.written > self.after:
            raise Killed

    @property
    def ops(self) -> FileOps:
        return replace(
            UNSYNCED, pwritev=self.pwritev, fdatasync=self.fdatasync, direct_bytes=self.direct_bytes
        )


@dataclass
class PowerCut:
    """Remembers what reached the device for certain. At a power cut any part of the other writes did, too.

    Files that are open with ``O_DSYNC`` have reached it after each write. Any other write is cut into sectors of
    ``sector`` bytes, each of which is lost or kept. The process dies after ``left`` calls; before, calls fail with the
    probability ``fails``. After a failed fdatasync, as on Linux, the kernel takes for written what it lost.
    """

    random: Random
    sector: int = 64
    left: int = 1 << 30
    fails: float = 0.0
    direct_bytes: int = FileOps().direct_bytes
    _durable: dict[str, bytearray] = field(default_factory=dict)
    _since: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    _synced: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def os_open(self, path: Path, flags: int, mode: int) -> int:
        fd = open_unsynced(path, flags, mode)
        if flags & os.O_DSYNC:
            self._synced.add(_path(fd))
        return fd

    def pwritev(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            self._call()
            data, name = b"".join(pieces), _path(fd)
            self._image(fd)
            is_bad = self.random.random() < self.fails
            if is_bad:
                data = data[: self.random.randrange(len(data) + 1)]
            write_any(fd, data, offset)
            if name in self._synced and not is_bad:
                end = offset + len(data)
                self._image(fd)[offset:end] = data
                before = self._since.get(name, [])  # an earlier write that failed does not come back
                before[:] = [(at, old) for at, old in before if at + len(old) <= offset or end <= at]
                return len(data)
            for at in range(0, len(data), self.sector):
                self._since.setdefault(name, []).append((offset + at, data[at : at + self.sector]))
            if is_bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return len(data)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            self._call()
            is_bad = self.random.random() < self.fails
            image = self._image(fd)
            for offset, data in self._since.pop(_path(fd), []):
                if not is_bad or self.random.random() < 0.5:
                    image[offset : offset + len(data)] = data
            if is_bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def _image(self, fd: int) -> bytearray:
        name = _path(fd)
        if name not in self._durable:
            self._durable[name] = bytearray(Path(name).read_bytes())
        return self._durable[name]

    def cut(self) -> None:
        """Leave in the files what the device has."""
        for name, image in self._durable.items():
            for offset, data in self._since.get(name, []):
                if self.random.random() < 0.5:
                    image[offset : offset + len(data)] = data
            Path(name).write_bytes(image)

    @property
    def ops(self) -> FileOps:
        return FileOps(
            os_open=self.os_open,
            pwritev=self.pwritev,
            fdatasync=self.fdatasync,
            direct_bytes=self.direct_bytes,
        )


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@dataclass
class DiskFaults:
    """Calls that fail: ``on`` names the call, ``where`` the file; ``error`` is raised while ``is_on``."""

    on: str
    where: str
    error: int
    is_on: bool = True

    @property
    def ops(self) -> FileOps:
        real: Callable[..., int] = getattr(os, self.on)

        def call(fd: int, *arguments: object) -> int:
            if self.is_on and Path(_path(fd)).name.startswith(self.where):
                raise OSError(self.error, os.strerror(self.error))
            return real(fd, *arguments)

        calls: dict[str, Any] = {self.on: call}
        return replace(FileOps(), **calls)


@dataclass
class HungDisk:
    """Reads of the file ``blocks`` wait until ``go`` is set. ``waiting``: the number of those that wait."""

    go: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def preadv(self, fd: int, pieces: Sequence[Any], offset: int) -> int:
        if Path(_path(fd)).name == "blocks":
            with self._lock:
                self.waiting += 1
            self.go.wait()
            with self._lock:
                self.waiting -= 1
        return os.preadv(fd, pieces, offset)

    @property
    def ops(self) -> FileOps:
        return FileOps(preadv=self.preadv)


@dataclass
class SlowDisk:
    """Writes of the file ``blocks`` wait until ``go`` is set. ``began``: one waits."""

    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    def pwritev(self, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        if Path(_path(fd)).name == "blocks":
            self.began.set()
            self.go.wait()
        return os.pwritev(fd, pieces, offset)

    @property
    def ops(self) -> FileOps:
        return FileOps(pwritev=self.pwritev)
