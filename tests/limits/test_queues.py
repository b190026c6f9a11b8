"""The order of requests that wait for a slot."""

from __future__ import annotations

import logging
import random
from math import inf
from typing import Any

import pytest

from router_core.cli import build
from slime_limits import FirstCome, LongestFirst, Rank, rank_of


@pytest.mark.parametrize(
    ("document", "rank"),
    [
        ({}, Rank(-inf, 128)),
        ({"priority": 3, "sampling_params": {"max_new_tokens": 9}}, Rank(3, 9)),
        ({"priority": -1, "max_tokens": 500}, Rank(-1, 500)),
        ({"max_completion_tokens": 70}, Rank(-inf, 70)),
        ({"sampling_params": [{"max_new_tokens": 5}, {"max_new_tokens": 80}, {}]}, Rank(-inf, 80)),
        ({"priority": True, "max_tokens": "many", "sampling_params": 3}, Rank(-inf, 128)),
    ],
)
def test_rank_is_read_from_the_body(document: dict[str, Any], rank: Rank) -> None:
    assert rank_of(document) == rank


def test_first_come_is_first_served_whatever_the_rank() -> None:
    queue = FirstCome[str]()
    for name, priority in (("a", 1), ("b", 3), ("c", 2)):
        queue.add(name, Rank(priority, 0))
    queue.discard("b")
    queue.discard("b")
    assert [queue.pop() for _ in range(2)] == ["a", "c"]


def test_priority_comes_before_length_and_length_before_arrival() -> None:
    queue = LongestFirst[str]()
    for name, rank in {
        "short": Rank(-inf, 1),
        "long": Rank(-inf, 9),
        "low": Rank(1, 1),
        "high": Rank(5, 2),
        "high, longer": Rank(5, 3),
        "high, later": Rank(5, 2),
    }.items():
        queue.add(name, rank)
    assert [queue.pop() for _ in range(3)] == ["high, longer", "high", "high, later"]
    assert queue.pop() == "short"  # the fourth is the one that waits longest
    assert [queue.pop() for _ in range(2)] == ["low", "long"]
    assert not len(queue)
    with pytest.raises(KeyError):
        queue.pop()


def test_short_request_leaves_in_the_end_though_longer_ones_keep_coming() -> None:
    queue = LongestFirst[int]()
    for number in range(10):
        queue.add(number, Rank(0, 1))
    popped: list[int] = []
    for number in range(10, 60):
        queue.add(number, Rank(0, 1000))
        popped.append(queue.pop())
    assert {*range(10)} <= {*popped[:40]}


def test_requests_that_left_take_no_memory_and_get_no_turn() -> None:
    rng = random.Random(1)
    queue = LongestFirst[int]()
    waiting: set[int] = set()
    for number in range(5000):
        queue.add(number, Rank(0, rng.randrange(100)))
        waiting.add(number)
        if len(waiting) > 20:
            gone = rng.choice(sorted(waiting))
            waiting.discard(gone)
            if rng.random() < 0.9:
                queue.discard(gone)
            else:
                waiting.add(gone)
                waiting.discard(queue.pop())
        assert len(queue) == len(waiting)
        assert len(queue._heap) <= 2 * (len(waiting) + 1) + 64
    assert queue.clear() == sorted(waiting)
    assert not len(queue)


def test_queue_policy_without_a_limit_has_no_effect_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        build(["--queue-policy", "lof"])
    assert caplog.messages == ["--queue-policy has no effect: it is for --max-concurrent-requests"]
