"""Names of the objects of a log of notes.

A note says what the router did with records, such as which records it wrote or deleted.
Notes are in objects ``notes/RUN.FIRST-LAST``. RUN is the name, in hex, of the run that wrote the notes. (A run is one
router process.) Each run numbers its notes from 1; FIRST and LAST are the numbers of the first and the last note in the
object. Notes are joined into larger objects later, so a note may be in several objects. A reader need not
read all objects, if it gets the notes of all numbers.

An object ``notes/RUN.whole`` says that only the notes of RUN and of later runs are needed. An object
``notes/RUN.moved`` says that the log of another tier, whose latest run is RUN, was copied: its notes to this log, and
the intact records that it names to the tier of this log.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from slime_tiered_store.tiers.remote.client import NOTES_FOLDER, RemoteError

__all__ = [
    "FOLDER",
    "RUN_BYTES",
    "SECOND_BYTES",
    "NoteObject",
    "NotesChanged",
    "StoredNote",
    "moved_name",
    "needed_and_missing",
    "new_run",
    "note_object",
    "note_objects",
    "whole_name",
]

FOLDER = NOTES_FOLDER
#: Sizes in bytes: of the name of a run, and of the start time (in seconds) with which the name begins. The rest of the
#: name is random. Later runs have greater names, since the time comes first.
RUN_BYTES, SECOND_BYTES = 11, 4
_NAME = re.compile(r"notes/([0-9a-f]{22})\.(\d+)-(\d+)")
_WHOLE = re.compile(r"notes/([0-9a-f]{22})\.whole")


class NotesChanged(RemoteError):
    """A note is missing. Another router may have joined it with other notes."""


class StoredNote(NamedTuple):
    """A note, or several joined notes.

    ``place``: the URL of the object. ``damage``: the reason why no content could be read, or "" if it was read.
    """

    run: bytes
    place: str
    content: bytes
    damage: str = ""


class NoteObject(NamedTuple):
    """The object with the notes ``first`` to ``last`` of a run."""

    run: str
    first: int
    last: int
    name: str


def new_run(after: bytes) -> bytes:
    """Return a name for a run that starts now, greater than the name ``after``."""
    second = max(int(time.time()), int.from_bytes(after[:SECOND_BYTES], "big") + 1 if after else 0)
    return second.to_bytes(SECOND_BYTES, "big") + os.urandom(RUN_BYTES - SECOND_BYTES)


def note_object(run: str, first: int, last: int) -> NoteObject:
    """Return the object with the notes ``first`` to ``last`` of ``run``."""
    return NoteObject(run, first, last, f"{FOLDER}/{run}.{first}-{last}")


def whole_name(run: str) -> str:
    """Return the name of the object which says that no earlier run is needed."""
    return f"{FOLDER}/{run}.whole"


def moved_name(run: str) -> str:
    """Return the name of the object which says that the records and notes of another log, up to ``run``, are copied."""
    return f"{FOLDER}/{run}.moved"


def note_objects(names: Iterable[str]) -> list[NoteObject]:
    """Return the objects of notes among ``names``, sorted by run, by first number, and by length, longest first."""
    found = [found for found in map(_NAME.fullmatch, names) if found]
    objects = [note_object(each[1], int(each[2]), int(each[3])) for each in found]
    return sorted(objects, key=lambda one: (one.run, one.first, -one.last))


def needed_and_missing(names: Iterable[str]) -> tuple[list[NoteObject], list[NoteObject]]:
    """Return the objects to read, in order, and the missing ones: one for each gap in the numbers of a run's notes."""
    names = list(names)
    whole = max((found[1] for found in map(_WHOLE.fullmatch, names) if found), default="")
    objects: list[NoteObject] = []
    missing: list[NoteObject] = []
    for one in note_objects(names):
        if one.run < whole:
            continue
        before = objects[-1] if objects and objects[-1].run == one.run else None
        last = before.last if before is not None else 0
        if one.last <= last:
            continue  # its notes were joined with others, and the object is not deleted yet
        if one.first > last + 1:
            missing.append(note_object(one.run, last + 1, one.first - 1))
        objects.append(one)
    return objects, missing
