"""Notes in the store's log: which segments and other records the store has, and what is known about sessions.

Notes are in the order of writing. Of several notes about the same segment or session, the latest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from slime_journal.record_frames import Frames, Torn
from slime_radix_cache.index.segments import Versions

__all__ = [
    "FORMAT",
    "AskedAgain",
    "Begun",
    "Copying",
    "DamagedNote",
    "Demoted",
    "Dropped",
    "DroppedRows",
    "Ended",
    "Grew",
    "Lost",
    "Rows",
    "RunBegun",
    "Settled",
    "SideRecord",
    "Unanswered",
    "WrongNote",
    "intact",
    "packed",
    "unpacked",
]

FORMAT = "slime-router demoted trajectories 5"


class WrongNote(ValueError):
    """A note is damaged, or of another format or tokenizer."""


class DamagedNote(WrongNote):
    """A note is damaged, or missing."""


class RunBegun(NamedTuple):
    """The first note of a run (one router process). ``tokenizer``: the fingerprint of the run's tokenizer."""

    format: str
    tokenizer: str


class Demoted(NamedTuple):
    """A segment in the store. ``key``: the key of its record.

    ``parent``: the key of its parent's record; empty if it has no parent.
    ``size``: bytes of the record. ``givers`` and ``is_odd``: see Giver. Other fields: see Entry and State.
    """

    key: bytes
    parent: bytes
    size: int
    session: str | None
    text: tuple[int, int, int]
    ids: tuple[int, int] | None
    tokens: int
    versions: Versions
    doubt: str | None
    givers: tuple[str, ...] | None
    is_odd: bool | None
    continuation_lost: bool
    is_decoded: bool
    marks: bytes


class Dropped(NamedTuple):
    """The record under ``key`` is not needed any more."""

    key: bytes


class Grew(NamedTuple):
    """Two records of one response, of which one is the beginning of the other. As a rule ``part`` is that beginning.

    But if a record got a new key, the note about this key has that record as ``part``, even if it is the longer one.
    """

    part: bytes
    whole: bytes


class Begun(NamedTuple):
    """From now on ``session`` may have responses that are in memory only."""

    session: str


class Settled(NamedTuple):
    """All responses of ``session`` are in the store, and no request of it runs."""

    session: str


class Unanswered(NamedTuple):
    """``session`` had requests without a recorded answer when the router ended."""

    session: str


class Lost(NamedTuple):
    """Something of a session, or of a text, is lost. ``kind``: "session" or "text".

    ``first`` and ``second``: the digest of that session or text.
    """

    kind: str
    first: int
    second: int


class SideRecord(NamedTuple):
    """A record of another plugin is in the store; ``size``: in bytes. See SideRecords in the contracts."""

    key: bytes
    size: int
    session: str | None
    name: bytes
    place: bytes


class AskedAgain(NamedTuple):
    """The same request came again, so ``place`` may get several side records. Some of them may be in memory only."""

    place: bytes


class Ended(NamedTuple):
    """The end of a run that left all trajectories in the store. Only notes about rows may follow."""


class Rows(NamedTuple):
    """The rows ``name`` of the response with the record ``key`` are in the store. Rows: see RowNotes in the contracts.

    If ``key`` is empty, the note is about the rows ``name`` of all responses. ``content``: plain values for the owner
    of the rows. ``records``: the keys of the records in the store that have the rows, each with its size in bytes.
    """

    key: bytes
    name: str
    content: tuple[Any, ...]
    records: tuple[tuple[bytes, int], ...]


class DroppedRows(NamedTuple):
    """The records of rows under ``keys`` are not needed any more."""

    keys: tuple[bytes, ...]


class Copying(NamedTuple):
    """The notes of this run are about records that a router copies to this store. See ``copying``.

    Up to the Ended note of the run, records may be missing if their keys begin with one of ``beginnings``.
    ``replaces``: names of runs with an unfinished copy of the same records.
    """

    beginnings: tuple[bytes, ...]
    replaces: tuple[bytes, ...]


_FRAMES = Frames(
    (
        *(RunBegun, Demoted, Dropped, Grew, Begun, Settled, Unanswered, Lost, SideRecord, AskedAgain, Ended),
        *(Rows, DroppedRows, Copying),
    )
)


def packed(notes: Sequence[Any]) -> bytes:
    """Return ``notes`` as bytes, with checksums. The first note of a run can be read even if the others cannot."""
    own = 1 if notes and isinstance(notes[0], RunBegun) else 0
    return b"".join(part for some in (notes[:own], notes[own:]) if some for part in _FRAMES.write(some))


def unpacked(content: bytes) -> Iterator[Any]:
    """Yield the notes in ``content``. Raises WrongNote."""
    try:
        for *_, notes in _FRAMES.read(memoryview(content)):
            yield from notes
    except Torn as torn:
        raise DamagedNote(f"it is damaged at byte {torn.offset}") from None


def intact(content: bytes) -> Iterator[tuple[int, list[Any] | None]]:
    """Yield the offset and the notes of each part of ``content``; the offset and None for a damaged part."""
    return _FRAMES.read_intact(memoryview(content))
