"""One directory of the SSD tier: a file of blocks, its index, its format and its lock.

=========== =====================================================================
file        content
=========== =====================================================================
store.json  the format: bytes of a block, number of slots; written last
blocks      the slots: a header and a block each, at multiples of 4 KiB
index.0/1   the block in each slot, see ``index_log``
lock        locked by the process that uses the directory
notes/      in one of the directories of the tier: the notes, see ``note_log``
=========== =====================================================================

``blocks`` and the index are allocated at the start, and never made smaller.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from router_core.errors import StartupError
from slime_tiered_store.tiers.block_header import HEADER_BYTES
from slime_tiered_store.tiers.ssd.block_file import ALIGNMENT, BlockFile
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.index_log import IndexLog, index_bytes, index_paths
from slime_tiered_store.tiers.ssd.run_buffer import RunBuffer, RunBuffers, device_memory
from slime_tiered_store.tiers.ssd.runs import SlotRun, longest_run

__all__ = ["Layout", "SsdDirectory", "lock_directory", "read_layout"]

logger = logging.getLogger(__name__)

_FORMAT = "slime-store-ssd-1"
_MAX_SLOTS = 1 << 32  # a record of the index has four bytes for a slot


@dataclass(frozen=True, slots=True)
class Layout:
    """The size of a block and the number of slots of a directory."""

    block_bytes: int
    slots: int

    @property
    def slot_bytes(self) -> int:
        """Distance between two slots in the file."""
        return -(-(HEADER_BYTES + self.block_bytes) // ALIGNMENT) * ALIGNMENT

    @property
    def total_bytes(self) -> int:
        """Size of the blocks and of both index files."""
        return self.slots * self.slot_bytes + 2 * index_bytes(self.slots)

    def buffer(self, slots: int) -> RunBuffer:
        """Return memory for runs of at most ``slots`` slots."""
        return RunBuffer(device_memory(slots * self.slot_bytes), self.slot_bytes, self.block_bytes)

    @classmethod
    def within(cls, size_bytes: int, block_bytes: int) -> Layout:
        """Return the largest layout whose files fit into ``size_bytes``. Raises StartupError."""
        empty, one = cls(block_bytes, 0).total_bytes, cls(block_bytes, 1).total_bytes
        if size_bytes < one:
            raise StartupError(
                f"--store-ssd-bytes: a directory needs at least {one} bytes for a block of {block_bytes}, "
                f"got {size_bytes}"
            )
        slots = (size_bytes - empty) // (one - empty)
        if slots > _MAX_SLOTS:
            raise StartupError(
                f"--store-ssd-bytes: a directory has at most {_MAX_SLOTS} blocks, got room for {slots}"
            )
        return cls(block_bytes, slots)


class SsdDirectory:
    """A directory of blocks, created if it is not there. ``log`` is its index.

    All methods block. They raise OSError; the constructor raises StartupError, which says what to do.
    """

    def __init__(self, path: Path, layout: Layout, ops: FileOps) -> None:
        self.path = path
        self.layout = layout
        self._ops = ops
        self._lock = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = lock_directory(path)
            if lock is None:
                raise StartupError(f"--store-ssd {path}: another process uses it; give each router its own")
            self._lock = lock
            former = read_layout(path)
            if former is not None and former.block_bytes != layout.block_bytes:
                raise ValueError(f"it has blocks of {former.block_bytes} bytes, not of {layout.block_bytes}")
            self._allocate()
            self._file = BlockFile(path / "blocks", ops, writable=True)
            self.log = IndexLog(path, layout.slots, ops, is_new=former is None)
            if self.log.skipped:
                logger.warning(
                    "%s: %d records of the index are unreadable, so their blocks are not found. "
                    "If the power failed, nothing acknowledged is lost: these records were still being written",
                    path,
                    self.log.skipped,
                )
            if former != layout:
                self._write_layout()
        except (OSError, ValueError) as error:
            self.close()
            told = error.strerror if isinstance(error, OSError) else error
            raise StartupError(
                f"--store-ssd {path}: {told}; mend it, or move the directory away to start without its blocks"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files and give the lock back."""
        if hasattr(self, "log"):
            self.log.close()
        if hasattr(self, "_file"):
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def buffers(self, count: int) -> RunBuffers:
        """Return ``count`` buffers for the longest run. No run is longer than the directory."""
        layout = self.layout
        slots = min(longest_run(layout.slot_bytes), layout.slots)
        return RunBuffers(count, slots, layout.slot_bytes, layout.block_bytes)

    def is_long(self, blocks: int, runs: int) -> bool:
        """Return True if ``runs`` runs of ``blocks`` blocks in all are long enough for direct transfers."""
        return blocks * self.layout.slot_bytes >= runs * self._ops.direct_bytes

    def is_direct(self, run: SlotRun) -> bool:
        """Return True if a write of the run may bypass the cache: the run is long, and uses all pages of its slots."""
        unused = self.layout.slot_bytes - HEADER_BYTES - min(map(len, run.buffers))
        return unused < ALIGNMENT and self.is_long(len(run.keys), 1)

    def write(self, run: SlotRun, buffer: RunBuffer, *, direct: bool) -> bool:
        """Write blocks. They are on the device after the next :meth:`sync`.

        Return False if a ``direct`` write is refused. See :class:`BlockFile`.
        """
        if direct:
            return buffer.write_directly(self._file, run)
        buffer.write(self._file, run)
        return True

    def read(
        self, run: SlotRun, buffer: RunBuffer, *, direct: bool
    ) -> tuple[list[memoryview], dict[bytes, str]]:
        """Read blocks, see :meth:`RunBuffer.read`."""
        return buffer.read(self._file, run, direct=direct)

    def sync(self) -> None:
        """Return when all written blocks are on the device."""
        self._file.sync()

    def _allocate(self) -> None:
        """Allocate all files, or leave them as they were."""
        sizes = {path: index_bytes(self.layout.slots) for path in index_paths(self.path)}
        sizes[self.path / "blocks"] = self.layout.slots * self.layout.slot_bytes
        opened: list[tuple[int, int]] = []
        try:
            for path, size in sizes.items():
                fd = self._ops.open(path, writable=True)
                opened.append((fd, os.fstat(fd).st_size))
                self._ops.allocate(fd, size)
        except OSError as error:
            for fd, former in opened:
                os.ftruncate(fd, former)  # a failed start must not leave a full disk
            raise StartupError(
                f"--store-ssd {self.path}: {self.layout.total_bytes} bytes cannot be allocated: {error.strerror}; "
                "free space, or lower --store-ssd-bytes"
            ) from None
        finally:
            for fd, _ in opened:
                os.close(fd)

    def _write_layout(self) -> None:
        path = self.path / "store.json"
        new = path.with_suffix(".tmp")
        with new.open("w") as file:
            json.dump({"format": _FORMAT, **asdict(self.layout)}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        for directory in (self.path, self.path.resolve().parent):  # makes the names of all files durable, too
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def lock_directory(path: Path) -> int | None:
    """Lock a directory until the returned descriptor is closed. Return None when another process has it."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def read_layout(path: Path) -> Layout | None:
    """Return the layout of a directory, or None for a new one. Raises OSError and ValueError."""
    try:
        content = json.loads((path / "store.json").read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ValueError("store.json is damaged") from None
    match content:
        case {"format": str(found), "block_bytes": int(block_bytes), "slots": int(slots)} if found == _FORMAT:
            if block_bytes < 1 or not 0 < slots <= _MAX_SLOTS:
                raise ValueError("store.json is damaged")
            return Layout(block_bytes, slots)
    raise ValueError(f"store.json has another format than {_FORMAT}")
