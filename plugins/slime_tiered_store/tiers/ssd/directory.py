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
from slime_tiered_store.tiers.block_header import HEADER_BYTES, Buffer, block_header
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.index_log import IndexLog, index_bytes, index_paths
from slime_tiered_store.tiers.ssd.run_buffer import RunBuffer
from slime_tiered_store.tiers.ssd.runs import SlotRun

__all__ = ["Layout", "SsdDirectory", "lock_directory", "read_layout"]

logger = logging.getLogger(__name__)

_ALIGNMENT = 4096
_FORMAT = "slime-store-ssd-1"
_ZEROS = memoryview(bytes(_ALIGNMENT))
_LONG_BYTES = 512 << 10
_MAX_SLOTS = 1 << 32  # a record of the index has four bytes for a slot


@dataclass(frozen=True, slots=True)
class Layout:
    """The size of a block and the number of slots of a directory."""

    block_bytes: int
    slots: int

    @property
    def slot_bytes(self) -> int:
        """Distance between two slots in the file."""
        return -(-(HEADER_BYTES + self.block_bytes) // _ALIGNMENT) * _ALIGNMENT

    @property
    def total_bytes(self) -> int:
        """Size of the blocks and of both index files."""
        return self.slots * self.slot_bytes + 2 * index_bytes(self.slots)

    def buffer(self, slots: int) -> RunBuffer:
        """Return memory for runs of at most ``slots`` slots."""
        return RunBuffer(slots, self.slot_bytes, self.block_bytes)

    @classmethod
    def within(cls, size_bytes: int, block_bytes: int) -> Layout:
        """Return the layout with the most slots whose files fit into ``size_bytes``. Raises StartupError."""
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

    All methods block. Raises OSError, and the constructor StartupError, which says what to do.
    """

    def __init__(self, path: Path, layout: Layout, ops: FileOps) -> None:
        self.path = path
        self.layout = layout
        self._ops = ops
        self._fd = self._lock = -1
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
            self._fd = ops.open(path / "blocks", writable=True)
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
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def write(self, run: SlotRun) -> None:
        """Write blocks. They are on the device after the next :meth:`sync`."""
        slot_bytes, pieces = self.layout.slot_bytes, list[Buffer]()
        first = run.slot
        for slot, (key, source) in enumerate(zip(run.keys, run.buffers, strict=True), run.slot):
            # Whole pages: the kernel would have to read the rest of a page that is written in part.
            padding = -(HEADER_BYTES + len(source)) % _ALIGNMENT
            pieces += (block_header(key, source), source)
            if padding:
                pieces.append(_ZEROS[:padding])
            if HEADER_BYTES + len(source) + padding < slot_bytes:  # a gap: the next block does not follow
                self._ops.write(self._fd, pieces, first * slot_bytes)
                pieces, first = [], slot + 1
        if pieces:
            self._ops.write(self._fd, pieces, first * slot_bytes)
        if (size := len(run.keys) * slot_bytes) >= _LONG_BYTES:  # written while the next run is prepared
            self._ops.begin_sync(self._fd, run.slot * slot_bytes, size)

    def read(self, run: SlotRun, buffer: RunBuffer) -> tuple[list[memoryview], dict[bytes, str]]:
        """Read blocks, see :meth:`RunBuffer.read`."""
        return buffer.read(self._ops, self._fd, run)

    def sync(self) -> None:
        """Return when all written blocks are on the device."""
        self._ops.sync(self._fd)

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
