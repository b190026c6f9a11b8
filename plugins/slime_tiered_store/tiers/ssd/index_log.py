"""The index of a directory: an append-only log of the block in each slot.

A record is 32 bytes, little-endian:

======  ======  ====================================================
offset  bytes   content
======  ======  ====================================================
0       4       1: the slot holds the block; 0: the slot is free
4       4       slot
8       16      key
24      8       XXH3-64 of the bytes before, seeded with the file's seed
======  ======  ====================================================

The log lies in one of two files of a fixed, preallocated size, so it never runs out of space. At each start, after a
failed write, and when the file is full, the records of all held slots are written to the other file. That file gets a
new random seed, and its header is written last. So records of an earlier use of the file, and torn records, do not
count. A damaged record affects only its own slot.

This log does not use ``slime_journal``, whose logs grow, are written on the event loop, and never wait for the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from slime_tiered_store.keys import key_at
from slime_tiered_store.recovered_blocks import repeated
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.runs import SlotRun

__all__ = ["FREE", "HELD", "IndexLog", "SlotTable", "index_bytes", "index_paths", "read_index"]

_MAGIC = b"SLIMEIDX"
_HEADER = Struct("<8sQQ")
_FIELDS = Struct("<II16s")
_SUM = Struct("<Q")
_RECORD_BYTES = 32
_SPARE_RECORDS = 1024
_AT_ONCE = 1 << 16  # records

FREE, HELD = 0, 1
_BYTES = np.dtype([("fields", f"V{_FIELDS.size}"), ("sum", f"V{_SUM.size}")])
_ROW = np.dtype([("kind", "<u4"), ("slot", "<u4"), ("key", "V16"), ("sum", "<u8")])


class SlotTable:
    """The key of each held slot, in 17 bytes a slot. Single calls are thread-safe."""

    def __init__(self, slots: int) -> None:
        self._held = bytearray(slots)
        self._keys = bytearray(16 * slots)

    def __len__(self) -> int:
        return len(self._held)

    def key(self, slot: int) -> bytes | None:
        """Return the key of the block in the slot, or None for a free slot."""
        return bytes(self._keys[16 * slot : 16 * slot + 16]) if self._held[slot] else None

    def missing(self, run: SlotRun) -> list[bytes]:
        """Return those keys of a run whose blocks are not in the slots of the run."""
        end = run.slot + len(run.keys)
        is_held = self._held.count(HELD, run.slot, end) == len(run.keys)
        if is_held and self._keys[16 * run.slot : 16 * end] == b"".join(run.keys):
            return []
        return [key for slot, key in enumerate(run.keys, run.slot) if self.key(slot) != key]

    def apply(self, kind: int, slot: int, keys: bytes) -> None:
        """Mark slots from ``slot`` on as free, or as held by the blocks of ``keys``: one slot for each 16 bytes."""
        end = slot + len(keys) // 16
        self._held[slot:end] = bytes(end - slot)
        if kind == HELD:
            self._keys[16 * slot : 16 * end] = keys
            self._held[slot:end] = b"\1" * (end - slot)

    def held(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield slot and key of each block in the slots from ``start`` to ``stop``, in the order of the slots."""
        for slot in self._held_slots(start, stop).data:
            yield slot, bytes(self._keys[16 * slot : 16 * slot + 16])

    def held_keys(self) -> tuple[npt.NDArray[np.int64], bytes]:
        """Return the held slots, and the keys of their blocks: 16 bytes each."""
        slots = self._held_slots()
        return slots, np.frombuffer(self._keys, "V16")[slots].tobytes()

    def rows(self, seed: int) -> bytes:
        """Return the records of all held slots. ``seed``: see the format of a record."""
        slots, keys = self.held_keys()
        return _packed(HELD, slots, np.frombuffer(keys, "V16"), seed)

    def _held_slots(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        return start + np.flatnonzero(np.frombuffer(self._held[start:stop], np.uint8))

    def count(self) -> int:
        """Return the number of held slots."""
        return self._held.count(HELD)


class IndexLog:
    """The log of a directory whose files are allocated. ``table``: the content of the log.

    ``skipped``: the number of unreadable records that were found. All methods block and raise OSError. Call them in one
    thread at a time. The constructor also raises ValueError if ``is_new`` is False and neither file has an intact
    header.
    """

    def __init__(self, directory: Path, slots: int, ops: FileOps, *, is_new: bool) -> None:
        self._ops = ops
        self._records = 2 * slots + _SPARE_RECORDS
        self._next: int | None = None
        self._seed = 0
        self._fds: list[int] = []
        try:
            for path in index_paths(directory):
                self._fds.append(ops.open(path, writable=True, flags=os.O_DSYNC))
            self.table, self.skipped, self._generation, self._current = _newest(self._fds, slots, ops)
            if is_new:
                self.table = SlotTable(slots)  # a first start was interrupted, or store.json was removed
            elif not self._generation:
                raise ValueError("the index is damaged")
            self._drop_duplicates()
            self.rewrite()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    @property
    def needs_rewrite(self) -> bool:
        """True after a write failed. Then it is unknown what the file says, so no slot may change before a rewrite."""
        return self._next is None

    def append(self, kind: int, runs: Sequence[SlotRun]) -> None:
        """Record that the slots of ``runs`` are free or held, wait for the device, and change the table.

        A slot may occur in ``runs`` at most twice: the file has no room for more.
        """
        slots = np.concatenate([np.arange(run.slot, run.slot + len(run.keys)) for run in runs])
        keys = [b"".join(run.keys) for run in runs]
        if self._next is None or self._next + len(slots) > self._records:
            self.rewrite()
        assert self._next is not None  # narrowing: a rewrite sets it, or raises
        place, self._next = self._next, None
        rows = _packed(kind, slots, np.frombuffer(b"".join(keys), "V16"), self._seed)
        self._write(self._fds[self._current], rows, _RECORD_BYTES * (1 + place))
        self._next = place + len(slots)
        for run, of_run in zip(runs, keys, strict=True):
            self.table.apply(kind, run.slot, of_run)

    def rewrite(self) -> None:
        """Write the records of all held slots to the other file. That file is the log from then on."""
        self._next = None
        generation, current = self._generation + 1, 1 - self._current
        fd, former = self._fds[current], self._fds[self._current]
        seed = int.from_bytes(os.urandom(8), "little")
        live = self.table.rows(seed)
        header = _HEADER.pack(_MAGIC, generation, seed)
        self._write(fd, bytes(_RECORD_BYTES), 0)  # remove the header of an earlier rewrite that failed
        self._write(fd, live, _RECORD_BYTES)
        self._write(fd, header + _SUM.pack(xxh3_64_intdigest(header)), 0)
        self._current, self._seed, self._generation = current, seed, generation
        # The former header must not count if the new one gets damaged.
        self._write(former, bytes(_RECORD_BYTES), 0)
        self._next = len(live) // _RECORD_BYTES

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        """Write, and wait for the device: the files are open with ``O_DSYNC``, which takes less time than fdatasync."""
        self._ops.write(fd, [data], offset)

    def _drop_duplicates(self) -> None:
        """Free all but one slot of each key: a forgotten block must not come back from another slot."""
        slots, keys = self.table.held_keys()
        for _, *others in repeated(keys):
            for place in others:
                self.table.apply(FREE, int(slots[place]), key_at(keys, place))


def index_bytes(slots: int) -> int:
    """Return the size in bytes of one of the two files."""
    return _RECORD_BYTES * (1 + 2 * slots + _SPARE_RECORDS)


def read_index(directory: Path, slots: int, ops: FileOps) -> tuple[SlotTable, int]:
    """Return the table of a directory, and the number of unreadable records. Changes nothing.

    Raises OSError, and ValueError when neither file has an intact header.
    """
    fds: list[int] = []
    try:
        for path in index_paths(directory):
            fds.append(ops.open(path, writable=False))
        table, skipped, generation, _ = _newest(fds, slots, ops)
    finally:
        for fd in fds:
            os.close(fd)
    if not generation:
        raise ValueError("the index is damaged")
    return table, skipped


def index_paths(directory: Path) -> tuple[Path, Path]:
    """Return the paths of the two files."""
    return directory / "index.0", directory / "index.1"


def _newest(fds: Sequence[int], slots: int, ops: FileOps) -> tuple[SlotTable, int, int, int]:
    """Return table, unreadable records, generation (0 if no header is intact) and number of the newer file."""
    (generation, seed), number = max((_header(ops, fd), number) for number, fd in enumerate(fds))
    table = SlotTable(slots)
    skipped = _replay(ops, fds[number], seed, table) if generation else 0
    return table, skipped, generation, number


def _header(ops: FileOps, fd: int) -> tuple[int, int]:
    """Return generation and seed, both 0 without an intact header."""
    data = bytearray(_RECORD_BYTES)
    ops.read(fd, [data], 0)
    magic, generation, seed = _HEADER.unpack_from(data)
    if magic != _MAGIC or _SUM.unpack_from(data, _HEADER.size)[0] != xxh3_64_intdigest(data[: _HEADER.size]):
        return 0, 0
    return generation, seed


def _replay(ops: FileOps, fd: int, seed: int, table: SlotTable) -> int:
    """Apply the intact records. Return the number of unreadable records before the last intact one."""
    data = bytearray(index_bytes(len(table)) - _RECORD_BYTES)
    size = ops.read(fd, [data], _RECORD_BYTES)
    rows = np.frombuffer(data, dtype=np.uint8)[: size - size % _RECORD_BYTES].reshape(-1, _RECORD_BYTES)
    intact = last = 0
    for place in np.flatnonzero(rows.any(axis=1)).data:
        at = _RECORD_BYTES * place
        fields = data[at : at + _FIELDS.size]
        if _SUM.unpack_from(data, at + _FIELDS.size)[0] != xxh3_64_intdigest(fields, seed):
            continue
        kind, slot, key = _FIELDS.unpack(fields)
        if slot < len(table):
            table.apply(kind, slot, key)
        intact += 1
        last = place + 1
    return last - intact


def _packed(kind: int, slots: npt.NDArray[np.int64], keys: npt.NDArray[np.void], seed: int) -> bytes:
    rows = np.empty(len(slots), _ROW)
    rows["kind"], rows["slot"], rows["key"] = kind, slots, keys
    fields = rows.view(_BYTES)["fields"]
    for start in range(0, len(rows), _AT_ONCE):  # since bytes objects take much more memory than rows
        some = slice(start, start + _AT_ONCE)
        digests = b"".join(map(xxh3_64_digest, fields[some].tolist(), repeat(seed)))
        rows["sum"][some] = np.frombuffer(digests, ">u8")
    return rows.tobytes()
