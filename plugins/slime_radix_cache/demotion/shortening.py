"""Removal of those notes of a run that later notes of the run replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_radix_cache.demotion.notes import (
    Begun,
    Demoted,
    Dropped,
    DroppedRows,
    Ended,
    Grew,
    Lost,
    Rows,
    Settled,
    SideRecord,
    Unanswered,
    packed,
    unpacked,
)

__all__ = ["shortened"]


def shortened(contents: Sequence[bytes]) -> list[bytes]:
    """Return ``contents`` (the notes of one run), each without its needless notes. Raises WrongNote.

    No note moves from one content to another: a router that has read some of the contents goes on with the next one,
    and the run may still append contents. A note is needless if a later note replaces it. But a Dropped note is always
    needed: another router may know the segment. If the run has not ended, the latest Begun or Settled note of each
    session is needed, even if it is Settled: another router may have read that the session has begun.
    """
    notes = [list(unpacked(content)) for content in contents]
    of_rows = Rows | DroppedRows
    latest = (note for some in reversed(notes) for note in reversed(some) if not isinstance(note, of_rows))
    needed = _Needed(has_ended=isinstance(next(latest, None), Ended))
    return [packed([note for note in reversed(some) if needed(note)][::-1]) for some in reversed(notes)][::-1]


class _Needed:
    """Returns True for a note that is needed. Call it for all notes of a run, the latest first."""

    def __init__(self, *, has_ended: bool) -> None:
        self._has_ended = has_ended
        self._later: set[tuple[Any, ...]] = set()

    def __call__(self, note: Any) -> bool:
        subject: tuple[Any, ...]
        match note:
            case Begun(session=session) | Settled(session=session):
                if self._has_ended:
                    return False  # all sessions are settled
                subject = (Begun, session)
            case Demoted(key=key) | SideRecord(key=key) | Dropped(key=key):
                subject = (Demoted, key)
            case Grew(part=part):
                subject = (Grew, part)
            case Lost() | Unanswered():
                subject = (type(note), note)
            case _:
                return True
        is_first = subject not in self._later
        self._later.add(subject)
        return is_first or isinstance(note, Dropped)
