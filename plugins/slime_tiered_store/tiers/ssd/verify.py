"""Reads every block and all notes of a directory of the SSD tier, and changes nothing."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_tiered_store.tiers.ssd.block_file import BlockFile
from slime_tiered_store.tiers.ssd.directory import lock_directory, read_layout
from slime_tiered_store.tiers.ssd.file_ops import FileOps
from slime_tiered_store.tiers.ssd.index_log import read_index
from slime_tiered_store.tiers.ssd.runs import SlotRun
from slime_tiered_store.tiers.ssd.verify_notes import DamagedNotes, verify_notes

__all__ = ["DirectoryReport", "verify_directory"]


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """The content of a directory. ``damaged``: slot, key and reason of each block that cannot be read.

    ``skipped_records``: unreadable records of the index. After a power cut these may be records of writes
    that were not acknowledged. ``notes``: the number of files with notes. ``damaged_notes``: see DamagedNotes.
    """

    directory: str
    block_bytes: int
    slots: int
    blocks: int
    skipped_records: int
    damaged: list[dict[str, Any]]
    notes: int
    damaged_notes: list[DamagedNotes]

    @property
    def is_intact(self) -> bool:
        """True when all blocks and all notes can be read."""
        return not self.damaged and not self.damaged_notes

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {"intact": self.is_intact, **asdict(self)}


def verify_directory(path: Path, ops: FileOps | None = None) -> DirectoryReport:
    """Read every block and all notes of a directory that no router uses. Blocks the caller.

    The report has damaged blocks and notes. Raises OSError, and ValueError if ``store.json`` or the index is damaged,
    if a router uses the directory, or if it is no directory of ``--store-ssd``.
    """
    ops = ops or FileOps()
    layout = read_layout(path)
    if layout is None:
        raise ValueError("it has no store.json, so it is no directory of --store-ssd")
    lock = lock_directory(path)
    if lock is None:
        raise ValueError("a router uses it; stop the router first")
    try:
        table, skipped = read_index(path, layout.slots, ops)
        damaged = []
        nothing, buffer = memoryview(b""), layout.buffer(1)
        file = BlockFile(path / "blocks", ops, writable=False)
        try:
            for slot, key in table.held():
                try:
                    _, wrong = buffer.read(file, SlotRun(slot, [key], [nothing]), direct=False)
                    reason = wrong.get(key)
                except OSError as error:
                    reason = str(error.strerror)
                if reason is not None:
                    damaged.append({"slot": slot, "key": key.hex(), "reason": reason})
        finally:
            file.close()
        notes, damaged_notes = verify_notes(path)
        return DirectoryReport(
            str(path), layout.block_bytes, layout.slots, table.count(), skipped, damaged, notes, damaged_notes
        )
    finally:
        os.close(lock)
