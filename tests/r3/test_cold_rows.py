"""Rows that leave memory for a store, without a router."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest

from deadlines import until
from radix_cache.shelf import Shelf
from slime_r3.cold_rows import ColdRows
from slime_r3.pieces import Part
from slime_r3.row_memory import RowMemory
from slime_r3.turn_rows import TurnRows
from slime_radix_cache.contracts import ConsumedTurn
from slime_sglang.token_arrays import IntArray

pytestmark = pytest.mark.anyio

SHARED, OWN = 5, 3  # rows of a prompt and of a response
ROWS: npt.NDArray[np.uint8] = np.arange((SHARED + OWN) * 6, dtype=np.uint8).reshape(-1, 6)


def turn(name: str) -> ConsumedTurn:
    return ConsumedTurn(name, "prompt", SHARED, OWN + 1, OWN + 1, (("1", OWN + 1),), adapter=None)


@asynccontextmanager
async def moving(turns: TurnRows, shelf: Shelf) -> AsyncIterator[ColdRows]:
    """Move what ``turns`` has too much of to ``shelf``."""
    cold = ColdRows(turns)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cold.run, shelf)
        await anyio.sleep(0.001)
        yield cold
        tasks.cancel_scope.cancel()


async def read(turns: TurnRows, cold: ColdRows, name: str) -> list[list[int]] | str:
    parts = turns.find([turn(name)], SHARED + OWN)
    return parts if isinstance(parts, str) else await rows_of(cold, parts)


async def rows_of(cold: ColdRows, parts: Sequence[Part]) -> list[list[int]] | str:
    taken: list[list[int]] = []

    async def take(rows: IntArray) -> None:
        taken.extend(rows.tolist())

    lost = await cold.reader.stream(parts, take)
    return taken if lost is None else lost


async def test_rows_that_differ_from_stored_ones_in_one_value_are_kept_apart() -> None:
    turns, shelf = TurnRows(RowMemory(1)), Shelf()
    async with moving(turns, shelf) as cold:
        turns.add([turn("a")], ROWS, 0)
        await until(lambda: not turns.size_bytes)
        assert turns.stored_bytes == ROWS.nbytes
        turns.add([turn("same")], ROWS, 0)
        await until(lambda: not turns.size_bytes)
        assert turns.stored_bytes == ROWS.nbytes + ROWS[SHARED:].nbytes
        for place in range(SHARED * 6):
            other, before = ROWS.copy(), turns.stored_bytes
            other.reshape(-1)[place] += 1
            turns.add([turn(f"c{place}")], other, 0)
            await until(lambda: not turns.size_bytes)
            assert turns.stored_bytes - before == ROWS.nbytes
            assert await read(turns, cold, f"c{place}") == other.tolist()
        assert await read(turns, cold, "a") == await read(turns, cold, "same") == ROWS.tolist()
        for name in ("a", "same", *(f"c{place}" for place in range(SHARED * 6))):
            turns.forget(name)
        assert (turns.stored_bytes, turns.size_bytes, shelf.records) == (0, 0, {})


async def test_rows_that_were_found_in_memory_are_read_after_they_have_left_it() -> None:
    turns = TurnRows(RowMemory(1))
    turns.memory.on_full.append(lambda: None)  # else they are dropped before there is a store
    turns.add([turn("b")], ROWS, 0)
    parts = turns.find([turn("b")], SHARED + OWN)
    assert not isinstance(parts, str)
    async with moving(turns, Shelf()) as cold:
        await until(lambda: not turns.size_bytes)
        turns.forget("b")
        assert await rows_of(cold, parts) == ROWS.tolist()


async def test_rows_that_are_forgotten_while_they_are_written_leave_no_record() -> None:
    turns, shelf = TurnRows(RowMemory(1)), Shelf()
    shelf.refuses = True
    async with moving(turns, shelf) as cold:
        turns.add([turn("a")], ROWS, 0)
        await until(lambda: shelf.refused > 0)
        turns.forget("a")
        turns.add([turn("b")], ROWS, 0)
        shelf.refuses = False
        await until(lambda: not turns.size_bytes)
        assert sum(map(len, shelf.records.values())) == turns.stored_bytes == ROWS.nbytes
        assert await read(turns, cold, "b") == ROWS.tolist()
        turns.forget("b")
        assert (turns.stored_bytes, turns.size_bytes, shelf.records) == (0, 0, {})


async def test_rows_that_come_while_others_are_written_stay() -> None:
    """A turn gets more rows of its own while its first ones are on their way."""
    turns, shelf = TurnRows(RowMemory(1)), Shelf()
    shelf.refuses = True
    async with moving(turns, shelf) as cold:
        turns.add([turn("a")], ROWS[:-1], 0)
        assert await read(turns, cold, "a") == "not_recorded"
        await until(lambda: shelf.refused > 0)
        turns.add([turn("a")], ROWS[-2:], SHARED + OWN - 2)
        turns.add([turn("a")], ROWS[SHARED:], SHARED)
        shelf.refuses = False
        await until(lambda: not turns.size_bytes)
        assert await read(turns, cold, "a") == ROWS.tolist()
        assert turns.stored_bytes == ROWS.nbytes


async def test_rows_that_the_store_does_not_take_are_dropped() -> None:
    turns, shelf = TurnRows(RowMemory(1)), Shelf(wait_s=0.05, stops_on_loss=True)
    shelf.refuses = True
    async with moving(turns, shelf) as cold:
        turns.add([turn("a")], ROWS, 0)
        await until(lambda: not turns.size_bytes)
        assert await read(turns, cold, "a") == "not_kept"


@asynccontextmanager
async def noted(*names: str, short: int = 0) -> AsyncIterator[tuple[ColdRows, dict[Any, Any]]]:
    """The notes about stored rows of turns, and a reader. ``short``: own rows that are not known at first."""
    turns, shelf, notes = TurnRows(RowMemory(1)), Shelf(), dict[Any, Any]()
    turns.on_stored = lambda response, entry: notes.setdefault(response, []).append(entry.note())
    async with moving(turns, shelf) as cold:
        for name in names:
            turns.add([turn(name)], ROWS[: len(ROWS) - short], 0)
            await until(lambda: not turns.size_bytes)
        if short:
            turns.add([turn(names[0])], ROWS, 0)
            await until(lambda: not turns.size_bytes)
        yield cold, notes


async def test_turns_share_a_prompt_by_their_notes_too() -> None:
    async with noted("a", "b") as (cold, notes):
        turns, forgotten = TurnRows(RowMemory(1)), list[bytes]()
        turns.forget_records = forgotten.extend
        for name in ("a", "b", "a"):  # the note of another router may be read again
            turns.restore(name, *notes[name][-1])
            assert await read(turns, cold, name) == ROWS.tolist()
        assert turns.stored_bytes == ROWS.nbytes + ROWS[SHARED:].nbytes
        turns.forget("a")
        assert len(forgotten) == 1
        assert await read(turns, cold, "b") == ROWS.tolist()
        turns.forget("b")
        records = {key for name in ("a", "b") for key, _ in notes[name][-1][1]}
        assert sorted(forgotten) == sorted(records)
        assert turns.stored_bytes == 0


@pytest.mark.parametrize("is_shared", [False, True])
async def test_rows_are_deleted_after_a_note_about_that(is_shared: bool) -> None:
    turns, shelf, dropped = TurnRows(RowMemory(1)), Shelf(), list[bytes]()
    shelf.is_shared = is_shared
    async with moving(turns, shelf) as cold:
        cold.drop_noted = dropped.extend
        turns.add([turn("a")], ROWS, 0)
        await until(lambda: not turns.size_bytes)
        keys = [*shelf.records]
        turns.forget("a")
        assert (sorted(dropped), [*shelf.records]) == (sorted(keys), keys)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1,), (0, 1, 0)])
async def test_note_with_more_rows_wins(order: tuple[int, ...]) -> None:
    async with noted("a", short=1) as (cold, notes):
        turns, forgotten = TurnRows(RowMemory(1)), list[bytes]()
        turns.forget_records = forgotten.extend
        for number in order:
            turns.restore("a", *notes["a"][number])
        assert await read(turns, cold, "a") == ROWS.tolist()
        assert (turns.stored_bytes, forgotten) == (ROWS.nbytes, [])


async def test_rows_in_memory_stay_unless_the_store_has_more() -> None:
    async with noted("a") as (cold, notes):
        for missing in (0, 1):
            turns = TurnRows(RowMemory(0))
            turns.add([turn("a")], ROWS[: len(ROWS) - missing], 0)
            size = turns.size_bytes
            turns.restore("a", *notes["a"][0])
            assert (turns.size_bytes, turns.stored_bytes) == ((0, ROWS.nbytes) if missing else (size, 0))
            assert not missing or not turns.overdue(1, all_must_go=True)
            assert await read(turns, cold, "a") == ROWS.tolist()


async def test_shared_store_keeps_what_another_run_has_written() -> None:
    async with noted("a") as (_, notes):
        turns, shelf = TurnRows(RowMemory(1)), Shelf()
        shelf.is_shared = True
        async with moving(turns, shelf):
            keys = [key for key, _ in notes["a"][0][1]]
            shelf.records = dict.fromkeys(keys, b"")
            turns.restore("a", *notes["a"][0])
            turns.add([turn("b")], ROWS, 0)
            await until(lambda: not turns.size_bytes)
            assert len(shelf.records) == 4  # a prompt of another run is not shared
            turns.forget("a")
            turns.forget("b")
            assert [*shelf.records] == keys


async def test_rows_are_moved_with_their_tokens() -> None:
    """At the same time as rows that memory has no room for; what the store refuses stays in memory."""
    turns, shelf = TurnRows(RowMemory(2 * ROWS.nbytes)), Shelf(wait_s=0.05)
    async with moving(turns, shelf) as cold, anyio.create_task_group() as tasks:
        for name in ("a", "b", "c"):
            turns.add([turn(name)], ROWS + np.uint8(len(turns)), 0)
        for _ in range(2):
            tasks.start_soon(cold.save_of, ["a", "c", "no such turn"])
        await until(lambda: [bool(turns.in_memory(name)) for name in ("a", "b", "c")] == [False, True, False])
        assert sum(map(len, shelf.records.values())) == turns.stored_bytes == 2 * ROWS.nbytes
        shelf.refuses = True
        await cold.save_of(["b"])
        for place, name in enumerate(("a", "b", "c")):
            assert await read(turns, cold, name) == (ROWS + np.uint8(place)).tolist()


async def test_rows_are_saved_at_the_end_if_the_router_had_begun() -> None:
    turns, shelf = TurnRows(RowMemory(0)), Shelf(wait_s=0.05)
    turns.add([turn("a")], ROWS, 0)
    await ColdRows(turns).save()
    await ColdRows(turns).save_of(["a"])
    assert turns.size_bytes == ROWS.nbytes
    async with moving(turns, shelf) as cold:
        await cold.save()
        assert (turns.size_bytes, turns.stored_bytes) == (0, ROWS.nbytes)
        shelf.refuses = True
        turns.add([turn("b")], ROWS, 0)
        await cold.save()
        assert await read(turns, cold, "b") == "not_kept"
