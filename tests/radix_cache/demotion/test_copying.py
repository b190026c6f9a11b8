"""A router whose records are copied to the store of other routers, without HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from radix_cache.cold_runs import SMALL, Run, run_on
from radix_cache.shelf import Note, Shelf
from slime_radix_cache.demotion import note_reader
from slime_radix_cache.demotion.copying import NotCopied
from slime_radix_cache.demotion.notes import (
    FORMAT,
    Begun,
    Copying,
    Demoted,
    Ended,
    RunBegun,
    Settled,
    intact,
    packed,
)
from slime_radix_cache.index.losses import Count

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def copying() -> AsyncIterator[tuple[Run, Shelf]]:
    """A router that copies the session "s", and another one's view of the store."""
    disk = Shelf(keeps_notes=True)
    async with run_on(disk, SMALL) as run:
        await run.turn("a", 2)
        await run.settled()
    store = Shelf(keeps_notes=True)
    store.written = list(disk.written)
    store.uncopied = list(disk.written)
    store.records = dict(disk.records)
    store.is_shared = True
    async with run_on(store, SMALL) as first:
        other = Shelf(keeps_notes=True)
        other.is_shared = True
        other.run = store.run
        other.written = [note for note in store.written if note not in disk.written]
        yield first, other


def end_copy(first: Run, other: Shelf) -> None:
    other.copy_run, other.closing = first.shelf.copy_run, first.shelf.closing
    other.end_copy(first.shelf.records)
    other.copy_run = b""


async def test_notes_that_are_copied_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Counter[bytes]()

    def counted(content: bytes) -> Iterator[tuple[int, list[Any] | None]]:
        parsed[content] += 1
        return intact(content)

    monkeypatch.setattr(note_reader, "intact", counted)
    async with copying() as (first, _):
        assert parsed == Counter(note.content for note in first.shelf.uncopied)


async def test_session_is_not_whole_elsewhere_until_it_is_copied() -> None:
    async with copying() as (first, store), run_on(store, SMALL) as second:
        assert not first.kept.has_lost("s")
        assert second.kept.has_lost("s")
        assert not second.cold._demotion.of_session("s")
        assert second.kept.candidates(b"ab") == Count(0, at_least=True)
        end_copy(first, store)
        await second.cold.load_session("s")
        assert not second.kept.has_lost("s")
        assert [len(one) for one in second.kept.responses_of("s")] == [1]


async def test_record_that_is_not_copied_yet_is_neither_deleted_nor_lost() -> None:
    async with copying() as (first, store), run_on(store, SMALL):
        key = next(iter(first.shelf.records))
        with pytest.raises(NotCopied, match="not in the store yet"):
            await store.was_deleted(key)
        end_copy(first, store)
        assert not await store.was_deleted(key)


async def test_note_of_a_second_copy_does_not_replace_a_later_note() -> None:
    key = b"run of x..." + bytes(5)
    known = Demoted(key, b"", 1, "s", (0, 0, 0), (0, 0), 1, (), None, None, None, False, False, b"")
    store = Shelf(keeps_notes=True)
    store.is_shared = True

    def written(run: bytes, *notes: Any) -> None:
        store.written.append(Note(run.ljust(11, b"."), "a note", packed([RunBegun(FORMAT, "toy"), *notes])))

    async with run_on(store, SMALL) as second:
        written(b"copy 1", Copying((key[:8],), ()), Begun("s"), known)
        written(b"router", Begun("s"), known._replace(continuation_lost=True), Settled("s"))
        written(b"copy 2", Copying((key[:8],), ()), Begun("s"), known)
        written(b"copy 2", Copying((key[:8],), (b"copy 1".ljust(11, b"."),)))
        await second.cold._look()
        assert second.kept.has_lost("s")
        assert not second.cold._demotion.of_session("s")
        written(b"copy 2", Ended())
        await second.cold._look()
        assert not second.kept.has_lost("s")
        (serial,) = second.cold._demotion.of_session("s")
        entry = second.cold._demotion.directory.get(serial)
        assert entry is not None
        assert entry.state.continuation_lost
