"""Rates, quantiles and the bound of the history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_dashboard.history import History, quantile
from slime_dashboard.numbers import Cumulative

BOUNDS = (0.1, 1.0, 10.0)
NOTHING = Cumulative(0, 0, 0, BOUNDS, (0, 0, 0, 0), (0, 0, 0, 0), 0, 0, 0, 0)


class ScriptedHistory:
    """A history whose clock and totals the test sets."""

    def __init__(self, size: int = 3) -> None:
        self.now = 0.0
        self.totals = NOTHING
        self.history = History(size, lambda: self.totals, lambda: self.now, lambda: 1000 + self.now)

    def after(self, elapsed_s: float, totals: Cumulative) -> None:
        """Add a sample."""
        self.now += elapsed_s
        self.totals = totals
        self.history.sample(4, 2)


def test_sample_has_the_rates_of_its_interval() -> None:
    scripted = ScriptedHistory()
    first = replace(NOTHING, succeeded=10, failed=1, prompt_tokens=500, sampled_tokens=50, hits=3, prompts=4)
    scripted.after(5, first)
    scripted.after(10, replace(first, succeeded=30, refused=5, hits=3, prompts=14))
    found = scripted.history.since(0)
    assert found["time"] == [1005, 1015]
    assert found["succeeded"] == [2, 2]
    assert found["refused"] == [0, 0.5]
    assert found["failed"] == [0.2, 0]
    assert found["prompt_tokens"] == [100, 0]
    assert found["sampled_tokens"] == [10, 0]
    assert found["hit_rate"] == [0.75, 0]
    assert found["in_flight"] == [4, 4]
    assert found["waiting"] == [2, 2]


def test_latencies_are_of_the_requests_of_the_interval() -> None:
    scripted = ScriptedHistory()
    slow = replace(NOTHING, whole=(0, 0, 8, 0), first_byte=(0, 4, 0, 0))
    scripted.after(5, slow)
    scripted.after(5, replace(slow, whole=(10, 0, 8, 0)))
    scripted.after(5, replace(slow, whole=(10, 0, 8, 0)))
    found = scripted.history.since(0)
    assert found["whole_p50"] == [5.5, 0.05, None]
    assert found["first_p50"] == [0.55, None, None]


def test_numbers_that_nobody_counts_are_none() -> None:
    scripted = ScriptedHistory()
    scripted.after(5, replace(NOTHING, prompt_tokens=None, hits=None, prompts=None))
    found = scripted.history.since(0)
    assert found["prompt_tokens"] == found["hit_rate"] == found["whole_p95"] == [None]


def test_history_keeps_the_latest_samples_only() -> None:
    scripted = ScriptedHistory(size=3)
    for number in range(5):
        scripted.after(5, replace(NOTHING, succeeded=number))
    assert scripted.history.since(0)["time"] == [1015, 1020, 1025]
    assert scripted.history.since(1020)["time"] == [1025]
    assert scripted.history.since(1025)["time"] == []


def test_sample_without_time_between_is_left_out() -> None:
    scripted = ScriptedHistory()
    scripted.after(0, replace(NOTHING, succeeded=1))
    assert scripted.history.since(0)["time"] == []


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((10, 0, 0, 0), 0.5, 0.05),
        ((0, 10, 0, 0), 0.95, 0.955),
        ((5, 0, 5, 0), 0.5, 0.1),
        ((5, 0, 5, 0), 0.75, 5.5),
        ((0, 0, 0, 7), 0.5, 10.0),  # longer than the last bound
    ],
)
def test_quantile_is_interpolated_within_its_bucket(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    assert quantile(BOUNDS, counts, share) == expected
