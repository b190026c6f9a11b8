"""Notes about rows that another plugin has put into the store."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from deadlines import until
from radix_cache.cold_runs import SMALL, Run, run_on
from radix_cache.shelf import Shelf
from slime_radix_cache.contracts import RowNotes
from slime_radix_cache.index.limits import Limits
from slime_radix_cache.index.losses import Count

pytestmark = pytest.mark.anyio

RECORD = (b"the key of rows.", 3)


class Owner:
    """The component ``"token_rows"``, as far as notes go."""

    notes: RowNotes

    def __init__(self, run: Run, at_the_end: Sequence[Any] = ()) -> None:
        self.restored: list[tuple[Any, ...]] = []
        self.forgotten: list[Hashable] = []
        self._run = run
        self._at_the_end = at_the_end
        assert run.cold.demotion is not None
        run.cold.demotion.gone = self.forgotten.append
        run.cold.rows.connect(self)  # type: ignore[arg-type]  # it records no rows

    def note_in(self, notes: RowNotes) -> None:
        self.notes = notes

    def restore(self, *told: Any) -> None:
        self.restored.append(told)

    def add(self, response: Hashable, content: tuple[Any, ...]) -> None:
        """Put a record into the store, and note it."""
        self._run.shelf.records[RECORD[0]] = bytes(RECORD[1])
        self.notes.add(response, "experts", content, [RECORD])

    async def save_of(self, responses: Sequence[Hashable]) -> None:
        for response in responses:
            self.add(response, ("demoted",))

    async def save(self) -> None:
        for response, content in self._at_the_end:
            self.add(response, content)


def serial_of(run: Run, session: str) -> int:
    (serial,) = run.cold._demotion.of_session(session)
    return serial


async def test_latest_note_about_a_kept_response_comes_back() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as run:
        await run.turn("a", 2)
        await run.settled()
        response = serial_of(run, "s")
        owner = Owner(run, at_the_end=[(response, (2, None, ("u1",)))])
        owner.add(response, (1,))
        owner.add(None, ("fact",))
        owner.notes.add(response + 9, "experts", (3,), [(b"no such response", 1)])
    for _ in range(2):  # the notes are written again at each start
        store = store.again()
        async with run_on(store, Limits()) as run:
            owner = Owner(run)
            restored = {told[0]: told[1:] for told in owner.restored}
            assert restored.pop(None) == ("experts", ("fact",), (RECORD,))
            assert restored == {serial_of(run, "s"): ("experts", (2, None, ("u1",)), (RECORD,))}
            assert store.records.keys() >= {RECORD[0]}
            await run.cold.load_text(b"ab", "s")
            assert run.kept.candidates(b"ab") == Count(1, at_least=False)  # nothing was lost at the end


async def test_rows_of_a_deleted_response_do_not_come_back() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as run:
        await run.turn("a", 2)
        await run.settled()
        owner = Owner(run)
        owner.add(serial_of(run, "s"), (1,))
        await run.cold.load_session("s")
        run.cold.forget("s")
        await run.settled()
    async with run_on(store.again(), Limits()) as run:
        assert Owner(run).restored == []
        assert RECORD[0] not in run.shelf.records


async def test_other_routers_learn_of_rows_until_their_response_is_gone() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as first, run_on(store.beside(), SMALL) as second:
        await first.turn("a", 2)
        await first.settled()
        owner, other = Owner(first), Owner(second)
        owner.add(serial_of(first, "s"), (1,))
        await first.settled()
        await second.cold.load_session("t")
        there = serial_of(second, "s")
        assert other.restored == [(there, "experts", (1,), (RECORD,))]
        gone = serial_of(first, "s")
        await first.cold.load_session("s")
        first.cold.forget("s")
        owner.notes.add(gone, "experts", (2,), [RECORD])
        other.notes.add(there, "experts", (3,), [RECORD])
        for run in (first, second):
            await run.settled()
        for _ in range(2):
            await second.cold.load_session("t")
            second.shelf.seen = 0  # all notes are read again
        assert (len(other.restored), other.forgotten[-1]) == (1, there)
        await first.cold.load_session("t")
        assert owner.restored == []


async def test_rows_may_be_noted_and_forgotten_before_their_response_is_known() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, Limits()) as first, run_on(store.beside(), SMALL) as second:
        await first.turn("a", 2)
        owner, other = Owner(first), Owner(second)
        (response,) = first.kept.responses_of("s")
        owner.add(response.serial, (1,))
        await first.cold._saver.writer.flush()
        async with run_on(left_now(first), SMALL) as third:
            assert [told[1:] for told in Owner(third).restored] == [("experts", (1,), (RECORD,))]
        await second.cold.load_session("t")
        (told,) = other.restored
        first.cold._demotion.forget(response.serial)
        await first.cold._saver.writer.flush()
        await second.cold.load_session("t")
        assert other.forgotten == [told[0]]


def left_now(run: Run) -> Shelf:
    """Return the store as a further router finds it now."""
    other = run.shelf.again()
    other.written.sort(key=lambda note: note.run)
    other.is_shared = True
    return other


async def demote_with_rows(run: Run) -> None:
    """Demote a response of the session "s", and note its rows."""
    await run.turn("a", 2)
    await run.settled()
    Owner(run).add(serial_of(run, "s"), (1,))
    await run.settled()


@pytest.mark.parametrize("deleted_by", [0, 1])
async def test_dropped_response_stays_dropped_when_earlier_notes_are_read_again(deleted_by: int) -> None:
    """As after a router that runs has joined its notes. The response was dropped before the third router started."""
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as first, run_on(store.beside(), SMALL) as second:
        await demote_with_rows(first)
        deleting = (first, second)[deleted_by]
        await deleting.cold.load_session("s")
        deleting.cold.forget("s")
        await deleting.settled()
        async with run_on(left_now(first), SMALL) as third:
            owner = Owner(third)
            third.shelf.seen = 0
            await third.cold.load_session("t")
            assert (third.cold._demotion.of_session("s"), owner.restored) == ([], [])


async def test_router_without_rows_ignores_the_notes() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as first, run_on(store.beside(), SMALL) as second:
        await demote_with_rows(first)
        await second.cold.load_session("s")
        assert not second.kept.has_lost("s")


async def test_dropped_rows_of_another_router_take_no_more_room_as_they_get_more() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as first, run_on(store.beside(), SMALL) as second:
        keys = [b"records " + number.to_bytes(8, "big") for number in range(1_000)]
        for start in (0, 500):
            for parity in (0, 1):
                first.cold.rows.drop(keys[start + parity : start + 500 : 2])
        await first.settled()
        await second.cold.load_session("t")
        assert len(second.cold._demotion.dropped_rows) == 1
        assert [await second.shelf.was_deleted(key) for key in keys] == [True] * 1_000
        assert not await second.shelf.was_deleted(b"records " + (1_000).to_bytes(8, "big"))


async def test_records_of_rows_are_deleted_after_the_note_about_that() -> None:
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as first, run_on(store.beside(), SMALL) as second:
        await demote_with_rows(first)
        await second.cold.load_session("s")
        assert not await second.shelf.was_deleted(RECORD[0])
        first.shelf.refuses = True
        first.cold.rows.drop([RECORD[0], b"another record.."])
        await until(lambda: first.cold._saver.failures["note"] > 0)
        assert RECORD[0] in first.shelf.records
        first.shelf.refuses = False
        await first.cold._saver.writer.flush()
        assert RECORD[0] not in first.shelf.records
        assert await second.shelf.was_deleted(RECORD[0])
        assert not await second.shelf.was_deleted(b"a third record..")
        async with run_on(left_now(first), SMALL) as third:
            third.shelf.seen = len(third.shelf.written)
            assert await third.shelf.was_deleted(RECORD[0])
