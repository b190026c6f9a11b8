"""System calls of the SSD tier, in one object, so that a test can make each of them fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import TypeAlias

from slime_tiered_store.tiers.block_header import Buffer

__all__ = ["FileOps"]

_Vectored: TypeAlias = Callable[[int, Sequence[Buffer], int], int]


@dataclass(frozen=True, slots=True)
class FileOps:
    """Positional I/O. All calls block, and raise OSError.

    :meth:`write` and :meth:`read` transfer all bytes; a read transfers fewer at the end of the file. All fields except
    ``direct_bytes`` are functions of ``os``, which may transfer fewer bytes at any time.

    ``direct_bytes`` decides which transfers bypass the page cache:

    - writes of runs (blocks in adjacent slots) that use all pages of their slots and have at least ``direct_bytes``
      bytes, if all such runs of a batch have at least 4 times ``direct_bytes`` bytes in total;
    - reads of a call whose runs have at least ``direct_bytes`` bytes on average, and at least 16 times ``direct_bytes``
      bytes in total.
    """

    os_open: Callable[[Path, int, int], int] = os.open
    pwritev: _Vectored = os.pwritev
    preadv: _Vectored = os.preadv
    fdatasync: Callable[[int], None] = os.fdatasync
    posix_fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    direct_bytes: int = 64 << 10

    def open(self, path: Path, *, writable: bool, flags: int = 0) -> int:
        """Return a descriptor of the file, which is created if it is to be ``writable``.

        ``flags``: further flags. With ``O_DSYNC``, a write returns when its bytes are on the device. With ``O_DIRECT``,
        transfers bypass the page cache; a file system may refuse this, here or at a transfer.
        """
        flags |= os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        return self.os_open(path, flags | os.O_CLOEXEC, 0o600)

    def allocate(self, fd: int, size: int) -> None:
        """Give the file at least ``size`` bytes on the device. Its content stays."""
        self.posix_fallocate(fd, 0, size)

    def write(self, fd: int, pieces: Sequence[Buffer], offset: int) -> None:
        """Write ``pieces`` one behind the other, however many calls it takes."""
        if self._transfer(self.pwritev, fd, pieces, offset) < sum(map(len, pieces)):
            raise OSError(EIO, "a write stopped short")

    def read(self, fd: int, into: Sequence[Buffer], offset: int) -> int:
        """Fill ``into`` in order. Return the number of bytes read: fewer than all only at the end of the file."""
        return self._transfer(self.preadv, fd, into, offset)

    def sync(self, fd: int) -> None:
        """Return when the content of the file is on the device."""
        self.fdatasync(fd)

    def _transfer(self, call: _Vectored, fd: int, pieces: Sequence[Buffer], offset: int) -> int:
        left, done, size = list(pieces), 0, sum(map(len, pieces))
        while left and (count := call(fd, left, offset + done)):
            done += count
            if done == size:
                break
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = memoryview(left[0])[count:]
        return done
