"""Turns with the same prompt share its rows only if these are equal."""

from __future__ import annotations

import numpy as np
import pytest

from slime_r3.row_memory import RowMemory
from slime_r3.turn_rows import TurnRows
from slime_radix_cache.contracts import ConsumedTurn
from slime_sglang.token_arrays import IntArray

SHARED, OWN = 5, 3  # rows of a prompt and of a response


def turn(name: str) -> ConsumedTurn:
    return ConsumedTurn(name, "prompt", SHARED, OWN + 1, OWN + 1, (("1", OWN + 1),), adapter=None)


@pytest.mark.parametrize("size", [6, 8])  # bytes of the prompt's rows: a multiple of eight, and none
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_rows_that_differ_in_one_value_are_kept_apart(size: int, kind: type) -> None:
    rows: IntArray = np.arange((SHARED + OWN) * size, dtype=kind).reshape(-1, size)
    kept = TurnRows(RowMemory(0))
    kept.add([turn("a")], rows, 0)
    first = kept.size_bytes
    assert first == rows.nbytes
    kept.add([turn("b")], rows.copy(), 0)
    assert kept.size_bytes - first == rows[SHARED:].nbytes
    for place in range(SHARED * size):
        other = rows.copy()
        other.reshape(-1)[place] += 1
        before = kept.size_bytes
        kept.add([turn(f"c{place}")], other, 0)
        assert kept.size_bytes - before == rows.nbytes
        for name, told in (("a", rows), ("b", rows), (f"c{place}", other)):
            parts = kept.find([turn(name)], SHARED + OWN)
            assert not isinstance(parts, str)
            read = np.concatenate([part.rows[: part.length] for part in parts if part.rows is not None])
            assert np.array_equal(read, told)


def test_rows_of_another_type_are_compared_by_value() -> None:
    rows = np.ones((SHARED + OWN, 8), np.uint8)
    kept = TurnRows(RowMemory(0))
    kept.add([turn("a")], rows, 0)
    before = kept.size_bytes
    wide = rows.astype(np.uint16)
    wide[-1] = 1_000
    kept.add([turn("b")], wide, 0)
    assert kept.size_bytes - before == wide[SHARED:].nbytes
