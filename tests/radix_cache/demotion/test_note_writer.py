"""The writer of notes."""

from __future__ import annotations

import anyio
import pytest

from deadlines import until
from radix_cache.shelf import Shelf
from slime_radix_cache.demotion.note_writer import NoteWriter
from slime_radix_cache.demotion.notes import Begun, unpacked

pytestmark = pytest.mark.anyio


async def test_note_that_cannot_be_packed_does_not_count_as_written() -> None:
    shelf = Shelf(keeps_notes=True)
    errors: list[Exception] = []
    writer = NoteWriter(shelf, errors.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        writer.add(Begun("s"))
        await writer.flush()
        writer.add(Begun("\ud800"))  # half a surrogate pair
        await until(lambda: len(errors) > 1)
        with anyio.move_on_after(0) as scope:
            await writer.flush()
        assert scope.cancelled_caught
        tasks.cancel_scope.cancel()
    assert [list(unpacked(note.content)) for note in shelf.written] == [[Begun("s")]]
