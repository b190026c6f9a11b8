"""Notes of a run that has ended, without those that its later ones make needless."""

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
    """Return as many ``contents``, each with those of its notes that are needed. None if the run has not ended.

    The needed ones stay where they are: a router that has read some of the contents may go on with the others.
    A Dropped note is always needed, since another router may know the segment. Raises WrongNote.
    """
    notes = [list(unpacked(content)) for content in contents]
    latest = (note for some in reversed(notes) for note in reversed(some) if not isinstance(note, Rows))
    if not isinstance(next(latest, None), Ended):
        return None
    needed = _Needed()
    return [packed([note for note in reversed(some) if needed(note)][::-1]) for some in reversed(notes)][::-1]


class _Needed:
    """Tells which notes are needed. To be asked about all notes of a run, the latest first."""

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
