"""Removal of the notes that a run which has ended does not need any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_radix_cache.demotion.notes import (
    Begun,
    Demoted,
    Dropped,
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


def shortened(contents: Sequence[bytes]) -> list[bytes] | None:
    """Return as many contents as ``contents``, with only the needed notes; None if the run has not ended.

    Each needed note stays in its content, since a router that has read some of the contents goes on with the next. A
    note is needless if a later note replaces it. But a Dropped note is always needed: another router may know the
    segment. Raises WrongNote.
    """
    notes = [list(unpacked(content)) for content in contents]
    latest = (note for some in reversed(notes) for note in reversed(some) if not isinstance(note, Rows))
    if not isinstance(next(latest, None), Ended):
        return None
    needed = _Needed()
    return [packed([note for note in reversed(some) if needed(note)][::-1]) for some in reversed(notes)][::-1]


class _Needed:
    """Returns True for a note that is needed. Call it for all notes of a run, the latest first."""

    def __init__(self) -> None:
        self._later: set[tuple[Any, ...]] = set()

    def __call__(self, note: Any) -> bool:
        match note:
            case Begun() | Settled():
                return False  # all sessions of a run that has ended are settled
            case Demoted(key=key) | SideRecord(key=key) | Dropped(key=key):
                subject: tuple[Any, ...] = (Demoted, key)
            case Grew(session=session, part=part):
                subject = (Grew, session, part)
            case Lost() | Unanswered():
                subject = (type(note), note)
            case _:
                return True
        is_first = subject not in self._later
        self._later.add(subject)
        return is_first or isinstance(note, Dropped)
