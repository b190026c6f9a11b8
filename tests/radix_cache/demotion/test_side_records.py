"""Records of another plugin beside the segments in a store of demoted trajectories."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from deadlines import until
from radix_cache.cold_runs import SMALL, Run, run_on
from radix_cache.shelf import Shelf
from slime_radix_cache.demotion.cold_trajectories import StoreFailed
from slime_radix_cache.demotion.notes import AskedAgain, Dropped, Ended, SideRecord, packed, unpacked
from slime_radix_cache.demotion.shortening import shortened
from slime_radix_cache.index.limits import Limits

pytestmark = pytest.mark.anyio

NAME, PLACE = b"name".ljust(16), b"place".ljust(16)


def added(
    run: Run, content: bytes, *, session: str | None = "s", name: bytes = NAME, place: bytes = PLACE,
    parent: bytes = b"",
) -> bytes:  # fmt: skip
    return run.cold.side.add(session, name, place, parent, lambda: content)


async def found(run: Run, *names: bytes) -> list[bytes | None]:
    side = run.cold.side
    return list(await side.fetch(side.find(names or [NAME])))


def after_a_kill(run: Run) -> Shelf:
    return run.shelf.again()


@asynccontextmanager
async def two_routers(limits: Limits) -> AsyncIterator[tuple[Run, Run]]:
    store = Shelf(keeps_notes=True)
    async with run_on(store, limits) as first, run_on(store.beside(), limits) as second:
        yield first, second


async def test_record_is_saved_when_an_answer_of_its_session_is_demoted() -> None:
    async with run_on(Shelf(keeps_notes=True), SMALL) as run:
        added(run, b"one")
        added(run, b"other", session="t")
        await run.turn("a", 2)
        await run.settled()
        assert await found(run) == [b"one", b"other"]
        async with run_on(after_a_kill(run)) as other:
            assert await found(other) == [b"one"]
            assert await found(other, PLACE) == [b"one"]


@pytest.mark.parametrize("session", ["t", None])
async def test_record_is_saved_with_those_that_it_needs(session: str | None) -> None:
    async with run_on(Shelf(keeps_notes=True), SMALL) as run:
        first = added(run, b"first", session=session)
        added(run, b"second", parent=added(run, b"needed", session=session, parent=first))
        await run.turn("a", 2)
        await run.settled()
        async with run_on(after_a_kill(run)) as other:
            assert await found(other) == [b"first", b"needed", b"second"]


async def test_stop_saves_all_records_and_each_start_keeps_them() -> None:
    store = Shelf(keeps_notes=True)
    for number in range(3):
        async with run_on(store) as run:
            assert await found(run) == [b"%d" % each for each in range(number)]
            added(run, b"%d" % number)
        store = store.again()


async def test_record_without_its_turn_in_memory_is_saved_at_once() -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        key = added(run, b"one")
        run.cold.side.save_soon(key)
        await until(lambda: key in run.shelf.records)
        await run.settled()
        async with run_on(after_a_kill(run)) as other:
            assert await found(other) == [b"one"]


async def test_record_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        kept: list[bytes] = []
        keep = run.shelf.keep

        async def counted(records: Sequence[tuple[bytes, bytes]]) -> None:
            kept.extend(key for key, _ in records)
            await keep(records)

        monkeypatch.setattr(run.shelf, "keep", counted)
        key = added(run, b"one")
        run.cold.side.save_soon(key)
        await anyio.lowlevel.checkpoint()
        await run.cold.side.save(["s"])
        await run.settled()
        assert kept == [key]


async def test_records_go_with_their_session() -> None:
    async with run_on(Shelf(keeps_notes=True), SMALL) as run:
        key = added(run, b"one")
        await run.turn("a", 2)
        await run.settled()
        late = added(run, b"late")
        run.cold.forget("s")
        await run.settled()
        assert await found(run) == []
        assert not {key, late} & {*run.shelf.records}
        async with run_on(after_a_kill(run)) as other:
            assert await found(other) == []


async def test_session_is_forgotten_while_its_record_is_written() -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        key = added(run, b"one")
        run.cold.side.save_soon(key)
        await until(lambda: key in run.shelf.records)
        run.cold.forget("s")
        await until(lambda: key not in run.shelf.records)
        await run.settled()
        async with run_on(after_a_kill(run)) as other:
            assert await found(other) == []


@pytest.mark.parametrize("when", ["at the start", "later"])
async def test_session_of_a_lost_record_is_not_whole(when: str) -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        key = added(run, b"one")
    store = after_a_kill(run)
    if when == "at the start":
        del store.records[key]
    async with run_on(store) as other:
        if when == "later":
            del store.records[key]
            assert await found(other) == [None]
        assert await found(other) == []
        assert other.cold.side.has_lost("s")
    async with run_on(store.again()) as third:
        assert third.cold.side.has_lost("s")


async def test_store_that_does_not_answer_is_an_error() -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        added(run, b"one")
    async with run_on(after_a_kill(run)) as other:
        other.shelf.is_closed = True
        with pytest.raises(StoreFailed):
            await found(other)
        other.shelf.is_closed = False
        assert await found(other) == [b"one"]


@pytest.mark.parametrize("session", ["s", None])
async def test_records_that_no_store_took_are_losses_at_the_end(session: str | None) -> None:
    async with run_on(Shelf(keeps_notes=True, wait_s=0.05)) as run:
        added(run, b"one", session=session)
        run.shelf.refuses = True
        await run.cold.side.save_all()
        run.shelf.refuses = False
    async with run_on(after_a_kill(run)) as other:
        assert other.cold.side.has_lost(session)


@pytest.mark.parametrize("session", ["s", None])
async def test_record_is_not_found_where_another_may_be_lost(session: str | None) -> None:
    async with run_on(Shelf(keeps_notes=True), SMALL) as run:
        added(run, b"one", session=session)
        added(run, b"other", session=session, name=b"other".ljust(16), place=b"elsewhere".ljust(16))
        await run.turn("a", 2, session=session)
        await run.settled()
        await run.cold.side.ask_again(PLACE)
        before_its_end = after_a_kill(run)
        assert await found(run) == [b"one"]
    async with run_on(run.shelf.again()) as after_a_stop:
        assert await found(after_a_stop) == [b"one"]
    async with run_on(before_its_end) as killed:
        killed.cold.side.lose(session)
        assert await found(killed) == []
        assert await found(killed, b"other".ljust(16)) == [b"other"]
    async with run_on(before_its_end.again()) as still:
        assert await found(still) == []


async def test_notes_of_records_are_shortened_with_the_others() -> None:
    records = [SideRecord(key, 1, "s", NAME, PLACE) for key in (b"a", b"b")]
    contents = [packed([*records, AskedAgain(PLACE)]), packed([Dropped(b"a"), Ended()])]
    short = [list(unpacked(content)) for content in shortened(contents)]
    assert short == [[records[1], AskedAgain(PLACE)], [Dropped(b"a"), Ended()]]


async def test_question_without_records_is_not_noted_for_ever() -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        for _ in range(2):
            await run.cold.side.ask_again(PLACE)
    async with run_on(run.shelf.again()) as other:
        notes = [note for stored in other.shelf.written for note in unpacked(stored.content)]
        assert not [note for note in notes if isinstance(note, AskedAgain | SideRecord)]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_place_asked_again_is_forgotten_with_its_records(is_shared: bool) -> None:
    """With other routers it is kept: one of them may have records to come."""
    async with run_on(Shelf(keeps_notes=True)) as run:
        run.shelf.is_shared = is_shared
        side = run.cold.side
        for session in ("s", "t"):
            added(run, b"one", session=session)
        await side.ask_again(PLACE)
        run.cold.forget("s")
        assert PLACE in side._asked_again
        run.cold.forget("t")
        assert (PLACE in side._asked_again) == is_shared


async def test_records_of_another_router_are_found_and_forgotten() -> None:
    async with two_routers(SMALL) as (first, second):
        added(first, b"one")
        await first.turn("a", 2)
        await first.settled()
        await second.cold.side.look()
        assert await found(second) == [b"one"]
        await first.cold.side.ask_again(PLACE)
        await second.cold.load_text(b"ab", "s", asks=True)  # so the session is not whole at the first one
        first.cold.forget("s")
        await first.settled()
        await second.cold.side.look()
        assert await found(second) == []
        second.shelf.seen = 0  # notes may come again
        await second.cold.side.look()
        assert await found(second) == []


async def test_session_with_an_unsaved_record_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an earlier record at the same place would be found after a kill, as if there had been no other."""
    async with run_on(Shelf(keeps_notes=True, wait_s=0.05), SMALL) as run:
        added(run, b"one")
        await run.turn("a", 2)
        await run.settled()
        keep = run.shelf.keep

        async def without_room(records: Sequence[tuple[bytes, bytes]]) -> None:
            if records[0][1] == b"two":
                raise OSError("no space left on the shelf")
            await keep(records)

        monkeypatch.setattr(run.shelf, "keep", without_room)
        await run.cold.side.ask_again(PLACE)
        await run.turn("b", 3)
        added(run, b"two")
        await run.settled()
        async with run_on(after_a_kill(run)) as other:
            assert other.cold.side.has_lost("s")
            assert await found(other) == []
        monkeypatch.undo()
        await run.turn("ab", 2)
        await run.settled()
        async with run_on(after_a_kill(run)) as other:
            assert not other.cold.side.has_lost("s")
            assert await found(other) == [b"one", b"two"]


async def test_session_that_is_open_elsewhere_may_have_another_record_there() -> None:
    async with two_routers(SMALL) as (first, second):
        added(first, b"one")
        await first.turn("a", 2)
        await first.settled()
        await first.cold.load_text(b"ab", "s", asks=True)  # a request begins
        await first.cold.side.ask_again(PLACE)
        await second.cold.side.look()
        assert await found(second) == []


@pytest.mark.parametrize("is_closed", [False, True])
async def test_requests_that_wait_for_notes_read_them_together(
    monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    async with two_routers(SMALL) as (first, second):
        news, may_read, readings, found_by = second.shelf.news, anyio.Event(), list[int](), list[int]()

        async def slow() -> Sequence[Any]:
            readings.append(1)
            await may_read.wait()
            if is_closed:
                raise OSError("the shelf is closed")
            return await news()

        async def look() -> None:
            with pytest.raises(StoreFailed) if is_closed else nullcontext():
                await second.cold.side.look()
            found_by.append(len(second.cold.side))

        monkeypatch.setattr(second.shelf, "news", slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await until(lambda: bool(readings))
            for _ in range(10):
                tasks.start_soon(look)
            added(first, b"one")
            await first.turn("a", 2)
            await first.settled()
            may_read.set()
        assert len(readings) == 2, "the first one had begun too early for the others"
        assert found_by == [int(not is_closed)] * 11


async def test_anonymous_records_are_not_found_while_another_router_runs() -> None:
    async with two_routers(SMALL) as (first, second):
        added(first, b"one", session=None)
        await first.turn("a", 2, session=None)
        await first.settled()
        await second.cold.side.look()
        assert await found(second) == []


async def test_router_without_a_lasting_store_keeps_no_records() -> None:
    async with run_on(Shelf()) as run:
        assert not run.cold.side.is_on


async def test_note_that_cannot_be_written_does_not_hold_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_radix_cache.demotion.note_writer._WAIT_S", 0.01)
    async with run_on(Shelf(keeps_notes=True, wait_s=0.05)) as run:
        run.shelf.refuses = True
        with anyio.fail_after(2):
            await run.cold.side.ask_again(PLACE)
        run.shelf.refuses = False


def seconds_for(run: Run, sessions: int) -> float:
    """The processor time to add and forget a record in each of ``sessions``, all of one name."""
    begun = time.thread_time()
    for number in range(sessions):
        added(run, b"", session=f"{number}", place=b"at%14d" % number)
    assert len(run.cold.side.find([NAME])) == sessions
    for number in range(sessions):
        run.cold.forget(f"{number}")
    assert not len(run.cold.side)
    return time.thread_time() - begun


async def test_time_for_a_record_does_not_grow_with_those_of_its_name() -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        gc.disable()  # a full collection takes as long as a thousand records
        try:
            few, many = (min(seconds_for(run, sessions) for _ in range(3)) for sessions in (500, 8_000))
        finally:
            gc.enable()
        assert many < 5 * 16 * few


async def test_records_under_one_name_go_one_by_one() -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        side = run.cold.side
        keys = [added(run, b"", session=f"{number}") for number in range(3)]
        for number, left in ((1, [keys[0], keys[2]]), (0, [keys[2]]), (2, [])):
            assert side.has_answers(PLACE)
            run.cold.forget(f"{number}")
            assert side.find([NAME]) == side.find([PLACE]) == left
        assert not side.has_answers(PLACE)
        assert [added(run, b"")] == side.find([NAME])
