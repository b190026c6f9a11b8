"""Shorter notes of a router say the same to routers that start, and to those that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from radix_cache.cold_runs import SMALL, run_on
from radix_cache.random_rollouts import Rollouts, told
from radix_cache.shelf import Note, Shelf
from slime_radix_cache.demotion.notes import (
    FORMAT,
    Begun,
    Demoted,
    Dropped,
    DroppedRows,
    Ended,
    Grew,
    Rows,
    RunBegun,
    Settled,
    packed,
    unpacked,
)
from slime_radix_cache.demotion.past import Past
from slime_radix_cache.demotion.shortening import shortened

pytestmark = pytest.mark.anyio

BEGUN = RunBegun(FORMAT, "toy")


def demoted(key: bytes, tokens: int = 0) -> Demoted:
    return Demoted(key, b"", 1, "s", (0, 0, 0), None, tokens, (), None, None, None, False, False, b"")


def shortened_notes(*contents: Sequence[Any]) -> list[list[Any]]:
    return [list(unpacked(content)) for content in shortened([packed(notes) for notes in contents])]


def test_needless_notes_go_and_the_others_stay_in_place() -> None:
    assert shortened_notes(
        [BEGUN, Begun("s"), demoted(b"a"), demoted(b"b")],
        [demoted(b"a", 2), Grew(b"a", b"b"), Settled("s")],
        [Dropped(b"b"), Dropped(b"other"), demoted(b"c"), Grew(b"a", b"c"), Ended()],
    ) == [
        [BEGUN],
        [demoted(b"a", 2)],
        [Dropped(b"b"), Dropped(b"other"), demoted(b"c"), Grew(b"a", b"c"), Ended()],
    ]


def test_each_session_of_a_run_that_may_go_on_keeps_its_latest_note() -> None:
    assert shortened_notes(
        [BEGUN, Begun("s"), Begun("t"), demoted(b"a")],
        [Settled("s"), Settled("t"), demoted(b"a", 2)],
        [Begun("s"), Dropped(b"b")],
    ) == [[BEGUN], [Settled("t"), demoted(b"a", 2)], [Begun("s"), Dropped(b"b")]]
    last = [Ended(), Rows(b"a", "experts", (), ()), DroppedRows((b"a",))]
    assert shortened_notes([BEGUN, Begun("s"), *last]) == [[BEGUN, *last]]
    assert shortened_notes([BEGUN, Begun("s"), Ended(), demoted(b"a")]) == [
        [BEGUN, Begun("s"), Ended(), demoted(b"a")]
    ]


async def shared(seed: int, *, is_killed: bool = False) -> Shelf:
    """A store with the notes of a router that has ended, or was killed, and deleted some of its sessions."""
    store = Shelf(keeps_notes=True)
    store.is_shared = True
    async with run_on(store, SMALL) as run:
        rollouts = Rollouts(run.kept, seed)
        for number in range(60):
            for session in {"one", "two", f"s{len(rollouts.texts) // 10}"} - set(run.cold._open._open):
                await run.cold._open.begin(session)
            rollouts.step()
            if number % 7 == 0:
                await run.settled()
            if number % 20 == 10:
                await run.promote_all()
                run.cold.forget("two")
        await run.settled()
        return copy(store, store.written) if is_killed else store


def copy(store: Shelf, notes: Sequence[Note]) -> Shelf:
    other = store.again()
    other.is_shared, other.written = True, list(notes)
    return other


def rewritten(store: Shelf) -> list[Note]:
    contents = shortened([note.content for note in store.written])
    return [note._replace(content=each) for note, each in zip(store.written, contents, strict=True)]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_router_that_starts_knows_the_same(seed: int, *, is_killed: bool) -> None:
    store = await shared(seed, is_killed=is_killed)
    short = rewritten(store)
    assert sum(len(each.content) for each in short) < sum(len(each.content) for each in store.written)
    long, again = (Past(notes, "toy", is_shared=True) for notes in (store.written, short))
    assert again.segments == long.segments
    assert (again.grown, again.lost, again.unanswered) == (long.grown, long.lost, long.unanswered)
    assert again.open == long.open
    assert bool(long.open) == is_killed
    async with run_on(copy(store, store.written)) as third:  # which shortens them
        await third.promote_all()
        assert [note.content for note in third.shelf.written[: len(short)]] == [
            each.content for each in short
        ]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("seed", range(2))
async def test_router_that_runs_knows_the_same_at_any_point(seed: int, *, is_killed: bool) -> None:
    store = await shared(seed, is_killed=is_killed)
    known: dict[str, Any] = {}
    for seen in range(len(store.written), 0, -max(1, len(store.written) // 8)):
        async with run_on(copy(store, store.written[:seen])) as reader:
            reader.shelf.written[:seen] = rewritten(store)
            reader.shelf.seen = 0
            await reader.cold._look()
            await reader.promote_all()
            sessions = {"one", "two", *(f"s{number}" for number in range(7))}
            shown = {
                name: (
                    sorted(map(told, reader.kept.responses_of(name)), key=repr),
                    reader.kept.has_lost(name),
                )
                for name in sorted(sessions)
            }
        known = known or shown
        assert shown == known
    assert any(responses for responses, _ in known.values())
