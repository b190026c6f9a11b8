"""Rows that leave memory for a store, without a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np
import numpy.typing as npt
import pytest

from deadlines import until
from radix_cache.shelf import Shelf
from slime_r3.cold_rows import ColdRows, RowsLost
from slime_r3.turn_rows import TurnRows
from slime_radix_cache.contracts import ConsumedTurn

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
    rows = parts if isinstance(parts, str) else await cold.read(parts)
    return rows if isinstance(rows, str) else rows.tolist()


async def test_rows_that_differ_from_stored_ones_in_one_value_are_kept_apart() -> None:
    turns, shelf = TurnRows(1), Shelf()
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
    turns = TurnRows(1)
    turns.on_full = lambda: None  # else they are dropped before there is a store
    turns.add([turn("b")], ROWS, 0)
    parts = turns.find([turn("b")], SHARED + OWN)
    assert not isinstance(parts, str)
    async with moving(turns, Shelf()) as cold:
        await until(lambda: not turns.size_bytes)
        turns.forget("b")
        rows = await cold.read(parts)
        assert not isinstance(rows, str)
        assert rows.tolist() == ROWS.tolist()


async def test_rows_that_are_forgotten_while_they_are_written_leave_no_record() -> None:
    turns, shelf = TurnRows(1), Shelf()
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
    turns, shelf = TurnRows(1), Shelf()
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


async def test_router_stops_if_the_store_says_so() -> None:
    turns, shelf = TurnRows(1), Shelf(wait_s=0.05, stops_on_loss=True)
    shelf.refuses = True
    turns.on_full = lambda: None
    turns.add([turn("a")], ROWS, 0)
    with pytest.raises(RowsLost, match="--store-on-loss mark"):
        await ColdRows(turns).run(shelf)
