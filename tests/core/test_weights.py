"""Versions of the weights: SGLang's strings, in an order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.weights import WeightUpdate, WeightVersions


def seen(*versions: str) -> tuple[str, ...]:
    weights = WeightVersions()
    for version in versions:
        weights.see(version)
    return weights.ordered


@pytest.mark.parametrize(
    ("versions", "order"),
    [
        ((), ()),
        (("10", "9", "1"), ("1", "9", "10")),
        (("default", "10", "9"), ("default", "10", "9")),
        (("10", "9", "default"), ("10", "9", "default")),  # no longer all numbers: as first seen
        (("b", "a", "b"), ("b", "a")),
        (("1.5", "-1", "2"), ("1.5", "-1", "2")),
        (("007", "6"), ("6", "007")),
    ],
)
def test_numbers_are_ordered_as_numbers_and_anything_else_as_first_seen(
    versions: tuple[str, ...], order: tuple[str, ...]
) -> None:
    assert seen(*versions) == order


@given(st.lists(st.integers(0, 10**30).map(str)))
def test_any_order_of_numbers_gives_one_order(versions: list[str]) -> None:
    assert list(seen(*versions)) == sorted(set(versions), key=int)


@given(st.lists(st.text(max_size=4)))
def test_each_version_stands_there_once(versions: list[str]) -> None:
    ordered = seen(*versions)
    assert len(set(ordered)) == len(ordered)
    assert set(ordered) == set(versions)


def test_a_move_tells_both_versions_and_who_said_so() -> None:
    weights = WeightVersions()
    assert weights.move("7", "announced") == WeightUpdate("7", None, "announced")
    assert weights.move("8", "http://10.0.0.1:1") == WeightUpdate("8", "7", "http://10.0.0.1:1")
    assert weights.current == "8"
    assert weights.ordered == ("7", "8")


def test_a_move_to_where_the_fleet_is_is_none() -> None:
    weights = WeightVersions()
    weights.move("7", "announced")
    assert weights.move("7", "announced") is None


def test_a_fleet_can_go_back() -> None:
    weights = WeightVersions()
    weights.move("7", "announced")
    weights.move("8", "announced")
    assert weights.move("7", "rollback") == WeightUpdate("7", "8", "rollback")
    assert weights.ordered == ("7", "8")


def test_a_version_that_is_only_seen_moves_nothing() -> None:
    weights = WeightVersions()
    weights.see("7")
    assert weights.current is None
    assert not weights.past


def test_the_past_is_what_the_fleet_has_had() -> None:
    weights = WeightVersions()
    weights.move("7", "announced")
    weights.see("9")
    weights.move("8", "announced")
    assert list(weights.past) == ["7", "8"]
