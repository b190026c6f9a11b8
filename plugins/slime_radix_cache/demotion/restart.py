"""Restoring of the trajectories of earlier runs (router processes) from the store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from router_core.errors import StartupError
from slime_radix_cache.cold_store import ColdStore
from slime_radix_cache.demotion.copying import CLOSING, opening
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.entry_notes import entry_of_note, note_of
from slime_radix_cache.demotion.note_reader import NoteReader
from slime_radix_cache.demotion.note_writer import NoteWriter
from slime_radix_cache.demotion.notes import FORMAT, Dropped, DroppedRows, Grew, Lost, RunBegun, packed
from slime_radix_cache.demotion.past import Past, mark_lost
from slime_radix_cache.demotion.shortening import shortened
from slime_radix_cache.demotion.side_records import SideRecords
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["restore"]

logger = logging.getLogger(__name__)


async def restore(
    store: ColdStore, tokenizer: str, trajectories: Trajectories, demotion: Demotion, writer: NoteWriter,
    side: SideRecords,
) -> Past:  # fmt: skip
    """Add to ``demotion`` and ``side`` what earlier runs demoted, and let ``writer`` note each change from now on.

    If the store's ``stops_on_loss`` is set, raises StartupError if records are gone or notes are damaged. Otherwise,
    segments whose records are gone are lost, with all that continues them, and damaged notes are left out. Raises
    StartupError for other errors, too.
    """
    notes = await store.notes()
    begun = RunBegun(FORMAT, tokenizer)
    reader = NoteReader(salvages=not store.stops_on_loss, twice=store.uncopied)
    here = Past(store.uncopied, tokenizer, reader=reader) if store.uncopied else None
    past = Past(notes, tokenizer, is_shared=store.is_shared, here=here, reader=reader)
    if reader.damage:
        notes = await store.mend_notes(notes, reader.damage, reader.mended(begun, past.marks))
    # A run is known even if all its records are gone: segments of later runs may still name its segments as parents.
    segments = (*past.segments.values(), *past.hidden.values(), *past.waiting.values())
    named = [key for each in segments for key in (each.key, each.parent) if key]
    named += [note.key for note in past.rows if note.key]
    # Another router that shares the store may join several of its notes into one. This router then reads their content
    # again, notes about dropped records included. So it remembers which records were dropped.
    dropped = past.dropped if store.is_shared else ()
    demotion.runs.begin([*named, *past.side_records, *dropped], store.run)
    demotion.dropped.update(map(demotion.runs.serial, dropped))
    demotion.dropped_rows = past.dropped_rows
    gone = set(await store.adopt(past.sizes))
    await store.replace_notes(past.as_notes())
    await store.shorten_notes(notes, shortened)
    if here is not None:
        facts = here.as_notes()
        copied = opening(begun, here.beginnings, here.sessions, facts, past.gone, past.replaced)
        await _written(store.copy(copied, CLOSING))
    if store.keeps_notes:
        # The note is written before this run has samples. If nothing else of this run is left, the note shows later
        # starts that the run existed, so that its samples may be lost.
        await _written(store.note(packed([begun, *past.marks])))
    _follow(demotion, trajectories, writer, past)
    gone_rows = tuple(key for note in past.rows for key, _ in note.records if key in gone)
    if gone_rows:
        writer.add(DroppedRows(gone_rows))  # so that the next start does not count them as lost again
    demotion.damaged = lambda serial: store.damaged(demotion.runs.key(serial))
    entries = sorted(
        (entry_of_note(note, demotion.runs) for note in past.segments.values()), key=lambda one: one.serial
    )
    for entry in entries:
        demotion.restore(entry)
    for seen in dict.fromkeys(version for entry in entries for version, _ in entry.versions):
        if seen is not None:
            trajectories.see_version(seen)
    _restore_grown(past, demotion, is_shared=store.is_shared)
    side.restore(past, gone)
    for entry in entries:
        has_parent = not entry.parent or entry.parent in demotion.directory
        if entry.serial in demotion.directory and (not has_parent or demotion.runs.key(entry.serial) in gone):
            demotion.lose(entry.serial)
    if notes:
        logger.info(
            "the store had %d segments of earlier runs; %d are lost",
            len(entries),
            len(entries) - len(demotion.directory),
        )
    return past


async def _written(write: Awaitable[None]) -> None:
    try:
        await write
    except Exception as error:
        raise StartupError(f"the log of demoted trajectories cannot be written: {error}") from error


def _follow(demotion: Demotion, trajectories: Trajectories, writer: NoteWriter, past: Past) -> None:
    """Mark what is lost according to ``past``, and let ``writer`` note all losses and changes from now on."""
    losses, runs = trajectories.losses, demotion.runs
    for note in past.lost:
        mark_lost(note, losses)
    losses.asked = past.unanswered
    losses.sessions.on_mark = lambda digest: writer.add(Lost("session", *digest))
    losses.texts.on_mark = lambda digest: writer.add(Lost("text", *digest))
    demotion.forget = lambda serial: writer.add(Dropped(runs.key(serial)))
    demotion.on_change = lambda entry: writer.add(note_of(entry, runs))
    demotion.grown.on_grown = lambda part, whole: writer.add(Grew(runs.key(part), runs.key(whole)))


def _restore_grown(past: Past, demotion: Demotion, *, is_shared: bool) -> None:
    runs = demotion.runs
    for pair in past.grown.items():
        for key in pair:
            runs.add(key)
        demotion.grown.serials.add(*map(runs.serial, pair))
    for key in {*past.grown, *past.grown.values()} - past.segments.keys():
        if not is_shared or key in past.dropped:  # else another router may note it later
            demotion.grown.serials.remove(runs.serial(key))
