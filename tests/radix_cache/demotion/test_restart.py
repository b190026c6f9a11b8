"""Trajectories that a router finds again in the store of an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import pytest

from radix_cache.cold_runs import SMALL, run_on
from radix_cache.direct import generate, read
from radix_cache.random_rollouts import Rollouts, picture, told
from radix_cache.shelf import Note, Shelf
from radix_cache.toy import EOS, pack, sampled, trajectories
from router_core.errors import StartupError
from slime_journal.record_frames import Frames
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.demotion.note_writer import NotNoted
from slime_radix_cache.demotion.notes import FORMAT, Begun, RunBegun, packed
from slime_radix_cache.index.segments import Giver
from slime_radix_cache.index.sessions import Running
from slime_radix_cache.index.trajectories import Limits, Trajectories

pytestmark = pytest.mark.anyio


def shelf() -> Shelf:
    return Shelf(keeps_notes=True)


def seen(kept: Trajectories) -> dict[str, Any]:
    """All that an answer may depend on. Versions without a segment decide only on ages."""
    return {name: value for name, value in picture(kept).items() if name != "versions"}


@pytest.mark.parametrize("limits", [SMALL, Limits()], ids=["demoted", "in memory"])
@pytest.mark.parametrize("seed", range(4))
async def test_everything_is_as_before_a_graceful_stop(seed: int, limits: Limits) -> None:
    store = shelf()
    before: dict[str, Any] = {}
    for start in range(3):
        async with run_on(store, limits) as run:
            await run.promote_all()
            assert not start or seen(run.kept) == before
            rollouts = Rollouts(run.kept, seed + 10 * start)
            for _ in range(40):
                rollouts.step()
            await run.settled()
            await run.promote_all()
            before = seen(run.kept)
        store = store.again()


@pytest.mark.parametrize("seed", range(4))
async def test_after_a_kill_a_session_is_whole_or_known_to_be_lost(seed: int) -> None:
    async with run_on(shelf(), Limits(tokens=30)) as run:
        rollouts = Rollouts(run.kept, seed)
        names = set()
        for number in range(60):
            asking = {"one", "two", f"s{len(rollouts.texts) // 10}"}
            names |= asking
            for session in asking:
                if session not in run.cold._open:
                    await run.cold._open.begin(session)
            rollouts.step()
            if number % 3 == 0:
                await run.settled()
            if number % 10 == 9:
                copy = run.shelf.again()  # what a kill would leave now
                async with run_on(copy) as other:
                    await other.promote_all()
                    mirror = run.shelf.again()
                    await run.promote_all()
                    for name in sorted(names):
                        ours = [told(one) for one in run.kept.responses_of(name)]
                        theirs = [told(one) for one in other.kept.responses_of(name)]
                        assert other.kept.has_lost(name) or theirs == ours
                        assert all(one in ours for one in theirs)
                    assert mirror.records.keys() >= copy.records.keys()
                    assert other.kept.candidates(b"ab").at_least  # samples without a session may be lost


async def test_lost_record_makes_its_session_incomplete(caplog: pytest.LogCaptureFixture) -> None:
    async with run_on(shelf(), SMALL) as run:
        for name in ("s", "t"):
            await run.turn("a", 2, session=name)
            await run.turn("aba", 5, session=name)
        await run.settled()
        second = max(one.serial for one in run.cold._demotion.directory.of("s"))
        lost = run.cold._demotion.runs.key(second)
    store = run.shelf.again()
    del store.records[lost]
    with caplog.at_level("INFO"):
        async with run_on(store) as other:
            assert other.kept.has_lost("s")
            assert not other.kept.has_lost("t")
            assert other.kept.evicted == {"not_in_store": 1}
            await other.cold.load_session("s")
            (first,) = other.kept.responses_of("s")
            assert first.continuation_lost
    assert "7 segments of earlier runs; 1 are lost" in caplog.text
    async with run_on(other.shelf.again()) as third:
        assert third.kept.has_lost("s")
        await third.cold.load_session("s")
        assert [one.continuation_lost for one in third.kept.responses_of("s")] == [True]


async def test_deleted_session_stays_deleted() -> None:
    async with run_on(shelf(), SMALL) as run:
        await run.turn("a", 2)
        await run.turn("b", 2, session="t")
        await run.settled()
        await run.cold.load_session("s")
        run.kept.forget("s")
        await run.settled()
        async with run_on(run.shelf.again()) as other:
            assert other.kept.has_lost("s")
            assert not other.cold._demotion.of_session("s")
            assert len(other.shelf.records) == 2
            assert list(other.cold._demotion.sessions) == ["t"]


async def test_what_may_change_of_a_segment_comes_back() -> None:
    async with run_on(shelf()) as run:
        kept = run.kept
        await run.cold.load_text(b"a", "s", asks=True)
        part = kept.record(None, pack(1), b"a", sampled(2), "s", Giver(("s",), is_odd=True))
        generate(kept, "ab<", sampled(6), "s")
        part.fields = part.fields._replace(is_decoded=True)
        kept.record(None, pack(1), b"a", sampled(2, 1), "s", Giver(("t",)), instead_of=part)
        running = Running("asking", b"aba", None)
        kept.begin(running)
        kept.end(running, is_recorded=False)
        longer = {one.ids: whole.ids for one, whole in kept.longer_of("s").items()}
        prompt = part.parent
        assert prompt is not None
        giver = prompt.giver  # type: ignore[attr-defined]  # a prompt
    async with run_on(run.shelf.again()) as other:
        assert "asking" in other.kept.losses
        assert not other.kept.has_lost("asking")
        await other.cold.load_session("s")
        assert {one.ids: whole.ids for one, whole in other.kept.longer_of("s").items()} == longer
        again = other.kept.responses_of("s")[0]
        assert again.is_decoded
        assert again.parent is not None
        assert again.parent.giver == giver  # type: ignore[attr-defined]  # a prompt
    async with run_on(other.shelf.again()) as third:
        assert "asking" in third.kept.losses


async def test_longer_record_comes_back_without_the_record_between() -> None:
    async with run_on(shelf(), SMALL) as run:
        kept = run.kept
        await run.cold.load_text(b"a", "s", asks=True)
        part = kept.record(None, pack(1), b"a", sampled(2), "s")
        kept.pin((part, 1))
        generate(kept, "ab<", sampled(6), "t")
        between = kept.record(None, pack(1), b"a", sampled(2, 1), "s", instead_of=part)
        kept.pin((between, 2))
        kept.unpin((part, 1))
        await run.settled()
        kept.unpin((between, 2))
        kept.record(None, pack(1), b"a", sampled(2, 1, 5), "s", instead_of=between)
        await run.settled()
    shelf_now = run.shelf
    for _ in range(2):
        async with run_on(shelf_now.again()) as other:
            await other.cold.load_session("s")
            assert [(len(one), len(longer)) for one, longer in other.kept.longer_of("s").items()] == [(1, 3)]
            assert len(other.cold._demotion.grown.serials) == 2
        shelf_now = other.shelf


async def test_kill_leaves_no_mark_of_a_session_that_was_demoted() -> None:
    async with run_on(shelf(), SMALL) as run:
        await run.turn("a", 2, EOS)
        await run.settled()
        killed = run.shelf.again()
        await run.turn("ab<e>a", 5)
        killed_later = run.shelf.again()
    async with run_on(killed) as other:
        assert not other.kept.has_lost("s")
        await other.cold.load_text(b"ab", "s")
        assert read(other.kept, "ab", "s") == ([1, 2, EOS], [0, 1, 1], None)
    async with run_on(killed_later) as other:
        assert other.kept.has_lost("s")


async def test_request_does_not_wait_for_ever_for_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_radix_cache.demotion.note_writer._WAIT_S", 0.05)
    async with run_on(shelf()) as run:
        run.shelf.refuses = True
        await run.turn("a", 2)
        assert run.kept.has_lost("s")
        await run.turn("b", 2)  # at once
        run.shelf.refuses = False


async def test_requests_that_begin_a_session_together_go_on_without_its_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime_radix_cache.demotion.note_writer._WAIT_S", 0.05)
    async with run_on(shelf()) as run:
        run.shelf.refuses = True
        async with anyio.create_task_group() as tasks:
            for text in ("a", "b"):
                tasks.start_soon(run.turn, text, 2)
        assert len(run.kept.responses_of("s")) == 2
        assert run.kept.has_lost("s")
        run.shelf.refuses = False


async def test_session_in_the_store_goes_on_only_when_that_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be whole after a kill, without the answer. So also while the store cannot be read."""
    monkeypatch.setattr("slime_radix_cache.demotion.note_writer._WAIT_S", 0.05)
    async with run_on(shelf(), SMALL) as run:
        await run.turn("a", 2)
        await run.settled()
        run.shelf.refuses = run.shelf.is_closed = True
        for _ in range(2):
            with pytest.raises(NotNoted):
                await run.turn("ab", 5)
        run.shelf.refuses = run.shelf.is_closed = False
        await run.settled()
        await run.turn("ab", 5)
        async with run_on(run.shelf.again()) as other:
            assert other.kept.has_lost("s")


async def test_requests_at_the_same_time_wait_for_one_note() -> None:
    async with run_on(shelf(), SMALL) as run:
        await run.turn("a", 2)
        await run.settled()
        run.shelf.refuses = True
        with anyio.move_on_after(0.2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run.turn, "b", 2)
                tasks.start_soon(run.turn, "ba", 2)
        killed = run.shelf.again()
        assert not run.kept.responses_of("s"), "no answer that a kill would hide"
        run.shelf.refuses = False
        async with run_on(killed) as other:
            assert not other.kept.has_lost("s")
        await run.turn("b", 2)
        await run.turn("ba", 2)
        async with run_on(run.shelf.again()) as other:
            assert other.kept.has_lost("s")


def damaged(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("harm", "tokenizer", "message"),
    [
        (damaged, "toy", "note 1: it is damaged at byte "),
        (lambda content: content[:-1], "toy", "note 1: it is damaged at byte "),
        (lambda content: content, "another", "tokenizer='toy'"),
    ],
    ids=["damaged", "torn", "tokenizer"],
)
async def test_log_that_cannot_be_read_ends_the_start(
    harm: Callable[[bytes], bytes], tokenizer: str, message: str
) -> None:
    async with run_on(shelf(), SMALL) as run:
        await run.turn("a", 2)
    store = run.shelf.again()
    store.stops_on_loss = True
    store.written[1] = store.written[1]._replace(content=harm(store.written[1].content))
    cold = ColdTrajectories(trajectories())
    with pytest.raises(StartupError, match="another directory, or prefix") as caught:
        await cold.open(store, tokenizer)
    assert message in str(caught.value)


async def test_router_does_not_start_without_its_first_note() -> None:
    store = shelf()
    store.refuses = True
    with pytest.raises(StartupError, match="cannot be written: no space left on the shelf"):
        await ColdTrajectories(trajectories()).open(store, "toy")


class Demoted(NamedTuple):
    """A note of another version of the router."""

    field: str


def other_version() -> bytes:
    frames = Frames((RunBegun, Demoted))
    return packed([RunBegun("another format", "toy")]) + b"".join(frames.write([Demoted("x")]))


async def test_log_of_another_version_is_refused_by_its_format() -> None:
    store = shelf()
    store.written.append(Note(store.run, "note 0", other_version()))
    with pytest.raises(
        StartupError, match=r"note 0: wanted notes of .*got RunBegun\(format='another format'"
    ):
        await ColdTrajectories(trajectories()).open(store, "toy")


async def test_router_of_another_version_beside_this_one_is_ignored() -> None:
    store = shelf()
    async with run_on(store, SMALL) as run:
        run.shelf.is_shared = True
        for _ in range(2):
            store.written.append(Note(bytes(11), "another", other_version()))
            await run.cold.load_session("s")


async def test_run_begins_with_its_format_alone() -> None:
    begun = RunBegun(FORMAT, "toy")
    assert packed([begun, Begun("s")]) == packed([begun]) + packed([Begun("s")])


async def test_stop_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async with run_on(shelf()) as run:
        await run.turn("a", 2)
        run.shelf.wait_s, run.shelf.refuses = 0.05, True
    assert "the store did not take all trajectories within 0.05 s" in caplog.text
    run.shelf.refuses = False
    async with run_on(run.shelf.again()) as other:
        assert other.kept.has_lost("s")
