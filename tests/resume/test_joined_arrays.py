"""Rows of several attempts: joined without a gap, or left out."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from slime_resume.joined_arrays import JoinedArrays

BODY = {"input_ids": [7, 8, 9], "return_routed_experts": True}


def told(places: range, version: str | None = "1", *, start: bool = True, size: int = 2) -> dict[str, Any]:
    """The ``meta_info`` of an attempt with the rows of the tokens at ``places``; a row has its place in it."""
    rows = np.repeat(np.array(places, "<i4"), size)
    meta: dict[str, Any] = {
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        "weight_version": version,
    }
    return meta | ({"routed_experts_start_len": places.start} if start else {})


def joined(arrays: JoinedArrays, sampled: int) -> list[int] | None:
    found = arrays.of(sampled)
    return found["routed_experts"].values[::2].tolist() if found else None


@pytest.mark.parametrize("start", [True, False])
def test_the_next_attempt_tells_the_row_of_the_last_token(start: bool) -> None:
    arrays = JoinedArrays(BODY)
    arrays.see(told(range(6), start=start), 4)
    assert arrays.next_start == 6
    arrays.ask()
    arrays.see(told(range(6, 9), start=start), 7, 4, {"1"})
    assert joined(arrays, 7) == list(range(9))
    assert joined(arrays, 6) == list(range(8))  # a stop string ended the response earlier


def test_an_engine_that_tells_known_rows_again_adds_only_new_ones() -> None:
    arrays = JoinedArrays(BODY | {"routed_experts_start_len": 2})
    arrays.see(told(range(2, 6)), 4)
    arrays.see(told(range(2, 9), "2"), 7, 4, {"1"})
    assert joined(arrays, 7) == list(range(2, 9))
    assert arrays.of(7)["routed_experts_start_len"] == 2


@pytest.mark.parametrize(
    ("before", "version", "wanted"),
    [("1", "1", list(range(9))), ("1", "2", None), (None, None, None), ("1", None, None)],
)
def test_an_attempt_without_rows_is_filled_under_the_same_weights_only(
    before: str | None, version: str | None, wanted: list[int] | None
) -> None:
    arrays = JoinedArrays(BODY)
    arrays.see({"weight_version": before}, 4)
    assert arrays.next_start == 0
    arrays.see(told(range(9), version), 7, 4, {before})
    assert joined(arrays, 7) == wanted


def test_engine_that_silently_ignores_the_start_is_understood() -> None:
    arrays = JoinedArrays(BODY)
    arrays.see(told(range(6), start=False), 4)
    arrays.ask()
    arrays.see(told(range(9), start=False), 7, 4, {"1"})
    assert joined(arrays, 7) == list(range(9))
    arrays = JoinedArrays(BODY | {"routed_experts_start_len": 4})
    arrays.see(told(range(6), start=False), 4)  # all rows of two values, or two rows of six?
    assert joined(arrays, 4) is None


@pytest.mark.parametrize(
    "wrong", [told(range(7, 9)), told(range(6, 9), size=3), {"routed_experts": "no"}, told(range(6, 8))]
)
def test_rows_with_a_gap_or_of_another_size_are_left_out(wrong: dict[str, Any]) -> None:
    arrays = JoinedArrays(BODY)
    arrays.see(told(range(6)), 4)
    arrays.see(wrong, 7, 4, {"1"})
    assert joined(arrays, 7) is None
