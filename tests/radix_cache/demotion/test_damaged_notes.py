"""Starts with damaged notes in the log: the router uses the others, and takes no session for whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from radix_cache.cold_runs import SMALL, run_on
from radix_cache.random_rollouts import Rollouts, told
from radix_cache.shelf import Note, Shelf
from radix_cache.toy import trajectories
from router_core.errors import StartupError
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.demotion.note_reader import NoteReader
from slime_radix_cache.demotion.notes import (
    FORMAT,
    Begun,
    Demoted,
    RunBegun,
    Settled,
    SideRecord,
    packed,
    unpacked,
)
from slime_radix_cache.index.trajectories import Limits

pytestmark = pytest.mark.anyio


def shelf() -> Shelf:
    return Shelf(keeps_notes=True)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def sessions_in(notes: list[Note]) -> set[str]:
    """The sessions that the notes name."""
    kinds = (Begun, Settled, Demoted, SideRecord)
    some = [one for note in notes for one in unpacked(note.content) if isinstance(one, kinds)]
    return {one.session for one in some if one.session is not None}


async def rolled(seed: int, *, is_shared: bool) -> tuple[Shelf, dict[str, list[object]]]:
    """The store of a router that was killed, and the responses of each session."""
    store = shelf()
    store.is_shared = is_shared
    async with run_on(store, Limits(tokens=30)) as run:
        rollouts = Rollouts(run.kept, seed)
        for _ in range(40):
            for session in ("one", "two", f"s{len(rollouts.texts) // 10}"):
                if session not in run.cold._open:
                    await run.cold._open.begin(session)
            rollouts.step()
            await run.settled()
        left = store.again()
        left.is_shared = is_shared
        await run.promote_all()
        names = ["one", "two", *(f"s{number}" for number in range(5))]
        return left, {name: [told(one) for one in run.kept.responses_of(name)] for name in names}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
@pytest.mark.parametrize("seed", range(3))
async def test_records_whose_notes_can_be_read_are_found_and_no_session_is_whole(
    seed: int, harm: str, is_shared: bool
) -> None:
    store, answers = await rolled(seed, is_shared=is_shared)
    some = random.Random(seed)
    for _ in range(4):
        at = some.randrange(1, len(store.written))
        note = store.written[at]
        harmed = {
            "flip": note._replace(content=flipped(note.content, some.randrange(len(note.content)))),
            "cut": note._replace(content=note.content[: some.randrange(1, len(note.content))]),
            "missing": note._replace(content=b"", damage="it is missing"),
        }[harm]
        damaged = store.again()
        damaged.is_shared = is_shared
        damaged.written[at] = harmed
        known = sessions_in(store.written[:at] + store.written[at + 1 :])

        damaged.stops_on_loss = True
        with pytest.raises(
            StartupError, match=rf"{note.place}: .*--store-on-loss mark to start with the notes"
        ):
            await ColdTrajectories(trajectories()).open(damaged, "toy")
        damaged.stops_on_loss = False
        async with run_on(damaged, Limits(tokens=30)) as other:
            assert len(damaged.damage) >= 1
            assert all(each.startswith(f"{note.place}: it is ") for each in damaged.damage)
            await other.promote_all()
            for name in known:
                assert other.kept.has_lost(name)
                assert all(told(one) in answers[name] for one in other.kept.responses_of(name))
            found = sum(len(other.kept.responses_of(name)) for name in known)
            assert not other.kept.has_lost("later")
            assert other.kept.candidates(b"ab").at_least
            await other.turn("a", 2, session="later")
            await other.settled()

        again = damaged.again()
        again.is_shared, again.stops_on_loss = is_shared, True
        async with run_on(again) as third:
            assert not again.damage
            assert all(third.kept.has_lost(name) for name in known)
            assert not third.kept.has_lost("later")
            await third.promote_all()
            assert sum(len(third.kept.responses_of(name)) for name in known) == found


async def test_notes_around_the_damaged_one_are_used() -> None:
    store = shelf()
    async with run_on(store, SMALL) as run:
        for name in ("s", "t", "u"):
            await run.turn("a", 2, session=name)
            await run.settled()
        left = store.again()
    frames = b"".join(note.content for note in left.written[1:])
    at = len(left.written[1].content)  # the second note about a session
    left.written[1:] = [left.written[1]._replace(content=flipped(frames, at))]
    async with run_on(left) as other:
        assert left.damage == [f"{left.written[1].place}: it is damaged at byte {at}"]
        await other.promote_all()
        assert sum(len(other.kept.responses_of(name)) for name in ("s", "t", "u")) >= 2


@pytest.mark.parametrize("has_another", [False, True])
async def test_tokenizer_is_proved_by_a_note_that_can_be_read(has_another: bool) -> None:
    begun = packed([RunBegun(FORMAT, "toy")])
    store = shelf()
    store.written = [
        Note(bytes(11), "note 0", flipped(begun, 20)),
        Note(bytes(11), "note 1", packed([Begun("s")])),
    ]
    if has_another:
        store.written.append(Note(b"\1" * 11, "note 2", begun))
        async with run_on(store) as run:
            assert run.kept.has_lost("s")
    else:
        with pytest.raises(StartupError, match=r"note 0: it is damaged at byte 0, and no other note names"):
            await ColdTrajectories(trajectories()).open(store, "toy")


@pytest.mark.parametrize("place", [0, 2])
async def test_damaged_notes_of_another_tokenizer_still_end_the_start(place: int) -> None:
    store = shelf()
    store.written = [Note(bytes(11), "note 1", packed([RunBegun(FORMAT, "other"), Begun("s")]))]
    store.written.insert(place, Note(bytes(11), "note 0", b"damaged"))
    with pytest.raises(StartupError, match="tokenizer='other'"):
        await ColdTrajectories(trajectories()).open(store, "toy")


async def test_chat_turns_are_not_trusted_since_a_note_that_they_were_asked_again_may_be_lost() -> None:
    record = SideRecord(bytes(11) + b"00001", 4, "s", b"name", b"place")
    store = shelf()
    store.written = [
        Note(bytes(11), "note 0", packed([RunBegun(FORMAT, "toy"), record])),
        Note(bytes(11), "note 1", b"damaged"),
    ]
    store.records[record.key] = b"turn"
    async with run_on(store) as run:
        assert not run.cold.side.find([b"name"])


class CountedNote:
    """A stored note that counts how often it is read."""

    def __init__(self, content: bytes) -> None:
        self.run, self.place, self.damage = bytes(11), "note", ""
        self._content = content
        self.reads = 0

    @property
    def content(self) -> bytes:
        self.reads += 1
        return self._content


@pytest.mark.parametrize("salvages", [False, True])
@pytest.mark.parametrize("harm", [bytes, lambda content: content + b"x"], ids=["intact", "damaged"])
def test_damage_is_named_once_although_a_note_is_read_twice(
    salvages: bool, harm: Callable[[bytes], bytes]
) -> None:
    note = CountedNote(harm(packed([RunBegun(FORMAT, "toy"), Begun("s")])))
    reader = NoteReader(salvages=salvages, twice=[note])
    if harm is bytes or salvages:
        assert reader.read(note) is reader.read(note)
        assert note.reads == 1
        assert len(reader.damage) == (harm is not bytes)
