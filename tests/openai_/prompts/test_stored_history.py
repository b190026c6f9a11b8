"""Turns that are stored beside demoted trajectories, and come back into memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from deadlines import until
from radix_cache.cold_runs import Run, run_on
from radix_cache.shelf import Shelf
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.identity import keys
from slime_openai.prompts.question import Question
from slime_openai.prompts.stored_history import StoredHistory
from slime_openai.prompts.template_traits import STRICT
from slime_openai.requests.messages import Message
from slime_radix_cache.demotion.errors import StoreFailed
from slime_radix_cache.demotion.notes import AskedAgain, SideRecord, unpacked

pytestmark = pytest.mark.anyio

ASKED, YES, MORE = Message("user", "Well?"), Message("assistant", "Yes."), Message("user", "And?")


def question(*messages: Message, session: str | None = "s", samples: int = 1) -> Question:
    return Question(
        messages,
        keys([b""], messages, STRICT),
        session,
        continues=False,
        traits=STRICT,
        samples=samples,
    )


def said(asked: Question, sampled: bytes, parent: Turn | None = None) -> Turn:
    """The answer YES, of these tokens, to ``asked``."""
    key, count, reply = asked.with_reply(YES, None)
    return Turn(
        parent, key, count, asked.session, b"ask ", sampled, reply, "?", "", 0, False, asked.place,
        asked.answers(parent.count if parent is not None else 0, count - 1),
    )  # fmt: skip


async def sampled_in(history: StoredHistory, asked: Question) -> list[bytes]:
    """The tokens of the turns that ``asked`` may continue, those that are preferred first."""
    assert await history.load(asked)
    found = history.find(asked.keys[1:], asked.place, asked.session, asked.answers)
    return [turn.sampled for alike in found for turn in alike.turns]


def stored(run: Run, max_bytes: int = 0, reader: str = "toy") -> StoredHistory:
    history = StoredHistory(max_bytes, run.kept.losses)
    history.keep_in(run.cold.side, reader)
    return history


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    async with run_on(Shelf(keeps_notes=True)) as started:
        yield started


async def asked_again(run: Run) -> int:
    """The number of notes of questions that were asked again."""
    await run.cold._saver.writer.flush()
    notes = [note for stored in run.shelf.written for note in unpacked(stored.content)]
    return sum(isinstance(note, AskedAgain) for note in notes)


async def test_turns_without_room_in_memory_come_back_in_their_order(run: Run) -> None:
    history = stored(run, max_bytes=1)
    for sampled in (b"one ", b"two "):
        await history.load(question(ASKED))
        history.add(said(question(ASKED), sampled))
    other = question(Message("user", "Else?"))
    history.add(said(other, b"else"))
    assert len(history) == 1
    assert await sampled_in(history, question(ASKED, YES, MORE)) == [b"two ", b"one "]
    history.add(said(question(ASKED), b"last"))
    assert len(history) == 1
    assert await sampled_in(history, question(ASKED, YES, MORE)) == [b"last", b"two ", b"one "]
    assert "s" not in run.kept.losses


async def test_long_conversation_comes_back_as_a_whole(run: Run) -> None:
    history = stored(run, max_bytes=1)
    messages: tuple[Message, ...] = (ASKED,)
    turn: Turn | None = None
    for number in range(20):
        asked = question(*messages, session="s" if number < 10 else "t")
        found = await sampled_in(history, asked)
        assert list(dict.fromkeys(found)) == [b"%4d" % each for each in reversed(range(number))]
        turn = said(asked, b"%4d" % number, turn)
        history.add(turn)
        messages += (YES, MORE)
        history.add(said(question(Message("user", str(number)), session="u"), b"else"))
    asked = question(*messages, session="t")
    await history.load(asked)
    first = next(history.find(asked.keys[1:], asked.place, "t", asked.answers)).turns[0]
    assert turn is not None
    assert (first.ids(), first.whole_text()) == (turn.ids(), turn.whole_text())


async def test_question_that_is_asked_again_is_noted_before(run: Run) -> None:
    history = stored(run)
    begun = history.asking("s", question(ASKED).place)
    await history.load(question(ASKED))
    begun.end()
    again = history.asking("s", question(ASKED).place)
    await history.load(question(ASKED))
    assert await asked_again(run) == 0, "the first request had no answer"
    history.asking("s", question(ASKED).place)  # at the same time
    await history.load(question(ASKED))
    assert await asked_again(run) == 1
    again.end()
    await history.load(question(ASKED, session="several", samples=2))
    assert await asked_again(run) == 2
    history.add(said(question(ASKED, session="t"), b"one "))
    for _ in range(2):
        await history.load(question(ASKED, session="t"))
    assert await asked_again(run) == 3


async def test_concurrent_questions_all_wait_for_the_note(run: Run) -> None:
    history = stored(run)
    history.add(said(question(ASKED), b"one "))
    await run.cold.side.save(["s"])
    run.shelf.refuses = True
    loaded = []
    async with anyio.create_task_group() as tasks:
        for _ in range(3):

            async def load() -> None:
                loaded.append(await history.load(question(ASKED)))

            tasks.start_soon(load)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert not loaded
        run.shelf.refuses = False
    assert loaded == [True] * 3


async def test_question_waits_for_no_note_while_its_answer_is_not_stored(run: Run) -> None:
    """The note of the answer comes after that of the question."""
    history = stored(run)
    history.add(said(question(ASKED), b"one "))
    run.shelf.refuses = True
    with anyio.fail_after(1):
        assert await history.load(question(ASKED))
    run.shelf.refuses = False
    await run.cold.side.save(["s"])
    notes = [note for stored in run.shelf.written for note in unpacked(stored.content)]
    assert [type(note) for note in notes[-2:]] == [AskedAgain, SideRecord]


async def test_repeated_question_is_noted_although_the_store_cannot_be_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = stored(run)
    history.add(said(question(ASKED), b"one "))

    async def fails() -> None:
        raise StoreFailed("the shelf is closed")

    monkeypatch.setattr(run.cold.side, "look", fails)
    unknown = question(ASKED, Message("assistant", "No."), MORE)
    history.add(said(unknown, b"two "))
    assert not await history.load(unknown)
    assert await asked_again(run) == 1


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"", lambda content: content * 2]
)
async def test_turn_whose_record_is_unreadable_is_not_continued(damage: Callable[[bytes], bytes]) -> None:
    async with run_on(Shelf(keeps_notes=True)) as run:
        history = stored(run)
        first = said(question(ASKED), b"one ")
        history.add(said(question(ASKED, YES, MORE), b"two ", first))
    store = run.shelf.again()
    async with run_on(store) as other:
        store.records[first.record] = damage(store.records[first.record])
        asked = question(ASKED, YES, MORE, YES, MORE)
        assert await sampled_in(stored(other), asked) == []


async def test_question_without_a_session_does_not_read_its_answers() -> None:
    """There may be very many."""
    async with run_on(Shelf(keeps_notes=True)) as run:
        stored(run).add(said(question(ASKED, session=None), b"one "))
    async with run_on(run.shelf.again()) as other:
        history = stored(other)
        await history.load(question(ASKED, session=None))
        assert len(history) == 0
        assert await asked_again(other) == 1
        assert await sampled_in(history, question(ASKED, YES, MORE, session=None)) == [b"one "]


async def test_conversations_of_another_reader_are_not_found(run: Run) -> None:
    stored(run, reader="one").add(said(question(ASKED), b"one "))
    asked = question(ASKED, YES, MORE)
    assert await sampled_in(stored(run, reader="other"), asked) == []
    assert await sampled_in(stored(run, reader="one"), asked) == [b"one "]


async def test_forgotten_session_goes_on_from_memory_and_is_stored_again(run: Run) -> None:
    history = stored(run)
    first = said(question(ASKED), b"one ")
    history.add(first)
    run.cold.side.save_soon(first.record)
    await until(lambda: bool(run.shelf.records))
    run.cold.forget("s")
    await until(lambda: not run.shelf.records)
    history.add(said(question(ASKED, YES, MORE), b"two ", first))
    await run.cold.side.save_all()
    async with run_on(run.shelf.again()) as other:
        asked = question(ASKED, YES, MORE, YES, MORE)
        assert await sampled_in(stored(other), asked) == [b"two ", b"one "]


async def test_session_that_is_forgotten_during_a_search_does_not_come_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = said(question(ASKED), b"one ")
    stored(run).add(first)
    await run.cold.side.save_all()
    fetch = run.shelf.fetch

    async def slow(keys: Sequence[bytes]) -> Sequence[bytes | None]:
        found = await fetch(keys)
        run.cold.forget("s")
        return found

    monkeypatch.setattr(run.shelf, "fetch", slow)
    history = stored(run)
    assert await sampled_in(history, question(ASKED, YES, MORE)) == []
    assert not len(run.cold.side)


@asynccontextmanager
async def copied_from(disk: Shelf) -> AsyncIterator[Run]:
    """A router that copies the records of ``disk`` to a store that it shares."""
    store = disk.again()
    store.is_shared, store.uncopied = True, list(disk.written)
    async with run_on(store) as copying:
        yield copying


@pytest.fixture
async def disk() -> Shelf:
    """The disk of a router that has stopped, with a turn of the session "old"."""
    async with run_on(Shelf(keeps_notes=True)) as run:
        stored(run).add(said(question(ASKED, session="old"), b"old "))
    return run.shelf


async def test_turn_that_is_not_copied_yet_hides_no_turn_of_another_session(disk: Shelf) -> None:
    async with copied_from(disk) as first:
        elsewhere = first.shelf.as_others_see(disk)
        async with run_on(elsewhere) as second:
            history = stored(second, max_bytes=1)
            history.add(said(question(ASKED, session="new"), b"new "))
            history.add(said(question(Message("user", "Else?")), b"else"))  # the other turn leaves memory
            for session in ("new", "third"):
                assert await sampled_in(history, question(ASKED, YES, MORE, session=session)) == [b"new "]
            asked = question(ASKED, YES, MORE, session="old")
            assert not await history.load(asked)
            elsewhere.end_copy(disk.records)
            assert await sampled_in(history, asked) == [b"old "]


async def test_turn_is_not_found_until_the_turn_before_it_is_copied(disk: Shelf) -> None:
    async with copied_from(disk) as first:
        here, asked = stored(first), question(ASKED, YES, MORE, session="new")
        assert await here.load(asked)
        (found,) = here.find(asked.keys[1:], asked.place, "new", asked.answers)
        here.add(said(asked, b"two ", found.turns[0]))
        await first.cold.side.save(["new"])
        await first.cold._saver.writer.flush()
        elsewhere = first.shelf.as_others_see(disk)
        async with run_on(elsewhere) as second:
            history, asked = stored(second), question(ASKED, YES, MORE, YES, MORE, session="new")
            assert not await history.load(asked)
            elsewhere.end_copy(disk.records)
            assert await sampled_in(history, asked) == [b"two ", b"old "]
