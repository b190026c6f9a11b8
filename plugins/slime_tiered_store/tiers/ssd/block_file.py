"""The file of blocks of a directory: long transfers bypass the page cache where the file system allows it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from errno import EINVAL, EOPNOTSUPP
from pathlib import Path

from slime_tiered_store.tiers.block_header import Buffer
from slime_tiered_store.tiers.ssd.file_ops import FileOps

__all__ = ["ALIGNMENT", "BlockFile"]

logger = logging.getLogger(__name__)

#: Offsets, sizes and memory addresses of direct transfers are multiples of this.
ALIGNMENT = 4096
_REFUSALS = (EINVAL, EOPNOTSUPP)


class BlockFile:
    """A file that is open twice: for direct transfers (``O_DIRECT``), and for transfers through the page cache.

    Linux keeps both ways coherent: a direct transfer first writes back the cached pages in its range, and a direct
    write drops them. Linux cannot drop a page that another thread has just changed through the cache, and a page of the
    cache may be larger than a block. So direct writes and cached writes must not run at the same time, not even at
    different places of the file.

    If the file system refuses a direct transfer, no further one is tried. Offsets and sizes must be multiples of
    ``ALIGNMENT``, and so must the memory addresses of direct transfers. All methods block, raise OSError, and are
    thread-safe.
    """

    def __init__(self, path: Path, ops: FileOps, *, writable: bool) -> None:
        self._path = path
        self._ops = ops
        self._lock = threading.Lock()
        self._is_direct = True
        self._fds = [ops.open(path, writable=writable)]
        try:
            self._fds.append(ops.open(path, writable=writable, flags=os.O_DIRECT))
        except OSError as error:
            if error.errno not in _REFUSALS:
                self.close()
                raise
            self._use_page_cache()

    def close(self) -> None:
        """Close the file."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def write(self, data: memoryview, offset: int) -> None:
        """Write through the page cache. The bytes are on the device after the next :meth:`sync`."""
        self._ops.write(self._fds[0], [data], offset)

    def write_directly(self, data: memoryview, offset: int) -> bool:
        """Write past the page cache. The bytes are on the device after the next :meth:`sync`.

        Return False if the file system refuses this, or stops within a page: then :meth:`write` must write all bytes.
        """
        return self._transfer_directly(self._ops.pwritev, data, offset) == len(data)

    def read(self, into: memoryview, offset: int, *, direct: bool) -> int:
        """Fill ``into``. Return the number of bytes read: fewer than all only at the end of the file."""
        done = self._transfer_directly(self._ops.preadv, into, offset) if direct else 0
        if done < len(into):
            done += self._ops.read(self._fds[0], [into[done:]], offset + done)
        return done

    def sync(self) -> None:
        """Return when all written bytes are on the device, whichever way they took."""
        self._ops.sync(self._fds[0])

    def _transfer_directly(
        self, call: Callable[[int, Sequence[Buffer], int], int], data: memoryview, offset: int
    ) -> int:
        """Return the number of bytes that were moved: fewer than all if direct transfers cannot move the rest."""
        done = 0
        while self._is_direct and done < len(data):
            try:
                count = call(self._fds[1], [data[done:]], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._use_page_cache()
                break
            done += count
            if not count or count % ALIGNMENT:
                break
        return done

    def _use_page_cache(self) -> None:
        with self._lock:
            if self._is_direct:
                logger.info("%s: the file system refuses direct I/O, so the page cache is used", self._path)
            self._is_direct = False
