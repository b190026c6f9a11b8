"""Reads the notes in a directory of the SSD tier, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_journal.record_frames import Torn, payloads
from slime_tiered_store.note_objects import FOLDER, needed_and_missing

__all__ = ["DamagedNotes", "verify_notes"]


@dataclass(frozen=True, slots=True)
class DamagedNotes:
    """A damaged or missing file of notes. A router starts in spite of it only with ``--store-on-loss mark``.

    ``offset``: the beginning of the damaged notes in the file.
    """

    file: str
    offset: int
    reason: str


def verify_notes(path: Path) -> tuple[int, list[DamagedNotes]]:
    """Return the number of files with notes that a start reads in the directory ``path``, and the damaged ones.

    As at a start, a file that was never completed (``.tmp``) does not count. Raises OSError.
    """
    try:
        found = [f"{FOLDER}/{one.name}" for one in (path / FOLDER).iterdir()]
    except FileNotFoundError:
        return 0, []  # the notes are in another directory of the tier
    objects, missing = needed_and_missing(found)
    damaged = [DamagedNotes(one.name, 0, "it is missing") for one in missing]
    for one in objects:
        try:
            content = (path / one.name).read_bytes()
            for _ in payloads(memoryview(content)):
                pass
        except OSError as error:
            damaged.append(DamagedNotes(one.name, 0, f"it cannot be read: {error.strerror}"))
        except Torn as torn:
            damaged.append(DamagedNotes(one.name, torn.offset, "its notes are damaged"))
        else:
            if not content:
                damaged.append(DamagedNotes(one.name, 0, "it is empty"))
    return len(objects), damaged
