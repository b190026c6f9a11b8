"""Conversion of the entries of demoted segments to notes, and back."""

from __future__ import annotations

from slime_radix_cache.demotion.directory import Entry, IdPlace, State, TextPlace
from slime_radix_cache.demotion.notes import Demoted
from slime_radix_cache.demotion.runs import Runs
from slime_radix_cache.index.segments import Giver

__all__ = ["entry_of_note", "note_of"]


def entry_of_note(note: Demoted, runs: Runs) -> Entry:
    """Return the entry that ``note`` is about."""
    giver = Giver(note.givers, note.is_odd) if note.givers is not None else None
    return Entry(
        runs.serial(note.key),
        runs.serial(note.parent),
        note.session,
        TextPlace(*note.text),
        IdPlace(*note.ids) if note.ids is not None else None,
        State(note.doubt, giver, note.continuation_lost, note.is_decoded),
        note.tokens,
        note.versions,
        note.size,
        note.marks,
    )


def note_of(entry: Entry, runs: Runs) -> Demoted:
    """Return a note about ``entry``."""
    state, text, ids = entry.state, entry.text, entry.ids
    return Demoted(
        runs.key(entry.serial),
        runs.key(entry.parent),
        entry.size,
        entry.session,
        (text.digest, text.last, text.first),
        (ids.digest, ids.last) if ids is not None else None,
        entry.tokens,
        entry.versions,
        state.doubt,
        state.giver.sessions if state.giver is not None else None,
        state.giver.is_odd if state.giver is not None else None,
        state.continuation_lost,
        state.is_decoded,
        entry.marks,
    )
