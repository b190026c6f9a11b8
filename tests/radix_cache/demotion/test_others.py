"""Routers that share a store, and read each other's notes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from radix_cache.cold_runs import SMALL, Run, run_on
from radix_cache.direct import generate, read
from radix_cache.shelf import Note, Shelf
from radix_cache.toy import pack, sampled
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.demotion.cold_trajectories import StoreFailed
from slime_radix_cache.demotion.notes import FORMAT, Begun, Dropped, RunBegun, packed
from slime_radix_cache.index.limits import Limits
from slime_radix_cache.index.losses import Count
from slime_radix_cache.retrieval.session_turns import SessionTurns

pytestmark = pytest.mark.anyio


def left_by(run: Run) -> Shelf:
    """The store as another router finds it when this one is killed now. Notes of earlier runs come first."""
    store = run.shelf.again()
    store.written.sort(key=lambda note: note.run)
    store.is_shared = True
    return store


@asynccontextmanager
async def two_routers(limits: Limits = SMALL) -> AsyncIterator[tuple[Run, Run]]:
    """Two routers, the first with room for nothing in memory, the second with these ``limits``."""
    store = Shelf(keeps_notes=True)
    async with run_on(store, SMALL) as first, run_on(store.beside(), limits) as second:
        yield first, second


@asynccontextmanager
async def equal_prompts() -> AsyncIterator[tuple[Run, Run]]:
    """Two routers that have recorded the same prompt, each for a session of its own; the first knows of both."""
    async with two_routers() as (first, second):
        for run, session in ((first, "s"), (second, "t")):
            await run.turn("a", 2, session=session)
            await run.settled()
        await first.cold.load_text(b"ab", "s")
        yield first, second


async def test_sample_of_another_router_is_found_and_continued() -> None:
    async with two_routers() as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold.load_text(b"ab", "s")
        assert read(second.kept, "ab", "s") == ([1, 2], [0, 1], None)
        assert second.kept.candidates(b"ab") == Count(1, at_least=True)
        await second.turn("aba", 5)
        await second.settled()
        await first.cold.load_session("s")
        assert [len(one) for one in first.kept.responses_of("s")] == [1, 1]
        assert not first.kept.has_lost("s")


async def test_session_is_not_whole_while_it_is_open_elsewhere() -> None:
    async with two_routers() as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold.load_text(b"ab", "s", asks=True)  # a request begins
        await first.cold.load_session("s")
        assert first.kept.has_lost("s")
        await second.turn("ab", 5)
        await second.settled()
        await first.cold.load_session("s")
        assert not first.kept.has_lost("s")


async def test_another_router_may_have_more_samples_as_soon_as_it_serves() -> None:
    store = Shelf(keeps_notes=True)
    store.is_shared = True
    async with run_on(store, Limits()) as first, run_on(store.beside(), Limits()) as second:
        for run in (first, second):
            await run.turn("a", 2, session=None)
        await second.cold.load_text(b"ab", None)
        assert second.kept.candidates(b"ab") == Count(1, at_least=True)


async def test_deletion_elsewhere_is_a_loss() -> None:
    async with two_routers() as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold.load_session("s")
        second.kept.forget("s")
        await second.settled()
        await first.cold.load_session("s")
        assert first.kept.has_lost("s")
        assert not first.kept.responses_of("s")


async def test_deleted_session_does_not_come_back_with_a_note_that_is_read_again() -> None:
    async with two_routers() as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold.load_session("s")
        second.cold.forget("s")
        await second.settled()
        second.shelf.seen = 0  # a log joins notes after a while
        await second.cold.load_session("s")
        assert not second.cold._demotion.of_session("s")
        assert second.kept.evicted == {"deleted": 1}


async def test_end_of_a_record_may_be_read_before_its_beginning() -> None:
    async with two_routers() as (first, second):
        await second.turn("a", 2)
        await second.settled()
        demoted = dict(first.shelf.records)
        await first.cold.load_session("s")
        first.cold.forget("s")
        await first.settled()
        await second.cold._look()
        later = left_by(first)
        later.records |= demoted  # the first router was killed before it has deleted them
        async with run_on(later) as third, run_on(later.beside()) as fourth:
            assert not third.cold._demotion.of_session("s")
            fourth.shelf.seen = 0
            await fourth.cold.load_session("s")
            assert not fourth.cold._demotion.of_session("s")


async def test_equal_prompts_of_two_routers_are_both_kept() -> None:
    """The first router must not delete the prompt that the second needs."""
    async with equal_prompts() as (first, second):
        assert first.kept.candidates(b"ab").number == 2
        await first.settled()
        await second.cold.load_session("t")
        assert [len(one) for one in second.kept.responses_of("t")] == [1]
        assert not second.kept.has_lost("t")


async def test_kill_of_a_router_with_an_equal_prompt_loses_nothing_of_others() -> None:
    async with two_routers(Limits()) as (first, second):
        await second.turn("a", 2, session="t")  # its prompt is in memory only
        await first.turn("a", 2)
        await first.settled()
        await second.cold.load_session("s")  # the two prompts become one
        await second.cold._saver.writer.flush()
        later = left_by(second)
        async with run_on(later) as third:
            await third.cold.load_session("s")
            assert [len(one) for one in third.kept.responses_of("s")] == [1]
            assert not third.kept.has_lost("s")


async def test_answer_to_a_prompt_that_became_one_with_another_is_found() -> None:
    async with equal_prompts() as (first, second):
        await second.turn("a", 2, session="u")  # behind the second router's prompt
        await second.settled()
        await first.cold.load_session("u")
        assert [len(one) for one in first.kept.responses_of("u")] == [1]
        assert not first.kept.has_lost("u")


async def test_deletion_keeps_the_prompt_that_another_router_continues() -> None:
    async with two_routers(Limits()) as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold._look()
        await second.turn("a", 2, session="t")  # behind the first router's prompt; in memory only
        await first.cold.load_session("s")
        first.cold.forget("s")
        await first.settled()
        await second.cold._look()
        await second.cold._save_all()
        second.cold._open.settle({"t"})
        await second.cold._saver.writer.flush()
        later = left_by(second)
        async with run_on(later) as third:
            for run in (first, third):
                await run.cold.load_session("t")
                assert [len(one) for one in run.kept.responses_of("t")] == [1]
                assert not run.kept.has_lost("t")


async def test_router_starts_when_only_the_continuation_of_a_run_is_left() -> None:
    async with two_routers() as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold._look()
        await second.turn("ab", 5, session="t")
        await second.settled()
        later = left_by(second)
        gone = [Dropped(key) for key in later.records if key.startswith(first.shelf.run)]
        later.written.append(Note(second.shelf.run, "deleted", packed(gone)))
        async with run_on(later) as third:
            assert third.kept.has_lost("t")
            assert third.kept.evicted == {"not_in_store": 1}


async def test_deletion_keeps_an_answer_that_another_session_continues_elsewhere() -> None:
    async with two_routers(Limits()) as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold._look()
        await second.turn("ab", 5, session="t")  # in memory only
        await first.cold.load_session("s")
        first.cold.forget("s")
        await first.settled()
        await second.cold._look()
        await second.cold._save_all()
        second.cold._open.settle({"t"})
        await second.cold._saver.writer.flush()
        async with run_on(left_by(second)) as third:
            for run in (second, third):
                await run.cold.load_session("t")
                assert not run.kept.has_lost("t")
                assert read(run.kept, "abbab", "t") == ([1, 2, 5], [0, 1, 1], None)
                assert run.kept.has_lost("s")


async def test_deletion_elsewhere_ends_what_is_in_memory_here() -> None:
    async with two_routers(Limits()) as (first, second):
        await first.turn("a", 2)
        await first.settled()
        await second.cold.load_session("s")
        await first.cold.load_session("s")
        first.cold.forget("s")
        await first.settled()
        await second.cold.load_session("s")
        assert not second.kept.responses_of("s")
        assert second.kept.has_lost("s")


async def test_beginning_of_a_longer_answer_is_no_sample_of_its_own() -> None:
    async with two_routers() as (first, second):
        await first.cold.load_text(b"a", "s", asks=True)
        part = first.kept.record(None, pack(1), b"a", sampled(2), "s")
        first.kept.pin((part, 1))
        generate(first.kept, "ab<", sampled(6), "s")  # something continues the beginning, so it stays
        whole = first.kept.record(None, pack(1), b"a", sampled(2, 1), "s", instead_of=part)
        assert first.kept.longer_of("s") == {part: whole}
        first.kept.unpin((part, 1))
        await first.settled()
        for _ in range(2):  # notes may be repeated
            await second.cold.load_session("s")
            assert {one.ids: longer.ids for one, longer in second.kept.longer_of("s").items()} == {
                pack(2): pack(2, 1)
            }
            second.shelf.seen = 0


async def test_longer_record_may_be_noted_after_another_router_has_begun() -> None:
    store = Shelf(keeps_notes=True)
    store.is_shared = True
    async with run_on(store, SMALL) as first:
        await first.cold.load_text(b"a", "s", asks=True)
        part = first.kept.record(None, pack(1), b"a", sampled(2), "s")
        first.kept.pin((part, 1))
        generate(first.kept, "ab<", sampled(6), "s")
        whole = first.kept.record(None, pack(1), b"a", sampled(2, 1), "s", instead_of=part)
        first.kept.unpin((part, 1))
        first.kept.pin((whole, 2))  # so it is not demoted yet
        await first.settled()
        async with run_on(store.beside()) as second:
            await second.cold.load_session("s")
            assert [len(one) for one in second.kept.responses_of("s")] == [1, 1]
            first.kept.unpin((whole, 2))
            await first.settled()
            await second.cold.load_session("s")
            assert [(len(one), len(longer)) for one, longer in second.kept.longer_of("s").items()] == [(1, 2)]


async def test_part_that_is_kept_here_alone_is_still_known_as_a_part() -> None:
    async with two_routers() as (first, second):
        await first.cold.load_text(b"a", "a", asks=True)
        part = first.kept.record(None, pack(1), b"a", sampled(2), "a")
        first.kept.pin((part, 1))
        await first.turn("abe", 6, session="x")  # something continues the beginning, so it stays
        first.kept.record(None, pack(1), b"a", sampled(2, 1), "a", instead_of=part)
        first.kept.unpin((part, 1))
        await first.turn("aba<", 6, session="c")
        await first.settled()
        await second.cold.load_text(b"aba", "s")  # which reads the notes
        await second.turn("ab<", 6)
        own = second.kept.responses_of("s")[-1]
        second.kept.pin((own, 1))
        await second.turn("aba>", 6)
        await second.settled()
        for session in ("x", "a"):
            await first.cold.load_session(session)
            first.cold.forget(session)
        await first.settled()
        await second.cold.load_session("s")
        source = SessionTurns(second.kept, str, RowRecorder(second.kept), second.cold, OpenStreams())
        turns = source.turns("s")
        sampled_in = [source.context(turn, turns).sampled for turn in turns]
        assert sorted(len(each) for each in sampled_in) == [2, 2]
        assert len({each[0][0] for each in sampled_in}) == 1
        second.kept.unpin((own, 1))


async def test_notes_for_another_tokenizer_are_ignored() -> None:
    async with two_routers() as (first, _):
        notes = [RunBegun(FORMAT, "another"), Begun("s")]
        first.shelf.written.append(Note(bytes(11), "another", packed(notes)))
        await first.cold.load_session("s")
        assert not first.kept.has_lost("s")


async def test_damaged_note_is_told_from_then_on() -> None:
    async with two_routers() as (first, _):
        first.shelf.written.append(Note(bytes(11), "note 7", b"damaged"))
        for _ in range(2):
            with pytest.raises(StoreFailed, match="note 7: it is damaged at byte 0"):
                await first.cold.load_session("s")


async def test_deleted_record_is_known_as_deleted_at_once() -> None:
    """Before anything else reads the notes about it. A record that no note drops is not."""
    async with two_routers() as (first, second):
        for session in ("s", "t"):
            await first.turn("a", 2, session=session)
        await first.settled()
        await second.cold._look()
        kept, gone = (
            [second.cold._demotion.runs.key(serial) for serial in second.cold._demotion.of_session(session)]
            for session in ("s", "t")
        )
        await first.cold.load_session("t")
        first.cold.forget("t")
        await first.settled()
        assert [await second.shelf.was_deleted(key) for key in (*kept, *gone)] == [False, True]
        assert second.kept.has_lost("t")
        assert not second.kept.has_lost("s")
        assert not await second.shelf.was_deleted(b"of no known run.")
