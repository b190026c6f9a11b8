"""The judge alone: what counts, and how many of it make a verdict."""

from __future__ import annotations

import errno
import math
from functools import partial
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import HTTPError
from router_core.errors import WorkerBroke, WorkerTimeout, WorkerUnreachable
from slime_health.judge import Judge, Severity, Unwell, fit, severity

NEVER = -math.inf


def unreachable(cause: OSError | None, status: int = 502) -> WorkerUnreachable:
    error = WorkerUnreachable("no", status=status)
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "proves"),
    [
        (Unwell("503"), "firm"),
        (unreachable(ConnectionRefusedError(errno.ECONNREFUSED, "refused")), "firm"),
        (WorkerBroke("closed"), "soft"),
        (WorkerBroke("closed", answered=True), "soft"),
        (WorkerTimeout("late"), "silent"),
        (unreachable(TimeoutError(), 504), "silent"),
        (unreachable(OSError(errno.EHOSTUNREACH, "no route")), "silent"),
        (unreachable(None), "silent"),
        (unreachable(OSError(errno.EMFILE, "too many open files")), "none"),
        (unreachable(OSError(errno.EADDRNOTAVAIL, "no port left")), "none"),
    ],
)
def test_severity_of_each_error(error: HTTPError, proves: Severity) -> None:
    assert severity(error) == proves


@pytest.mark.parametrize(
    ("said", "fleet", "seen", "fits"),
    [
        ("7", "7", ["7"], "same"),
        ("7", None, [], "same"),
        (None, None, [], "same"),
        (None, "7", ["7"], "other"),
        ("default", "7", ["default", "7"], "other"),
        ("default", "7", ["7"], "other"),  # what an engine says that was started anew
        ("6", "7", ["6", "7"], "other"),
        ("6", "7", ["7"], "other"),
        ("8", "7", ["7"], "ahead"),
        ("10", "9", ["9"], "ahead"),
        ("8", "7", ["7", "8"], "other"),  # the fleet has been there, and came back
        ("step-2", "step-1", ["step-1"], "ahead"),
        ("step-1", "step-2", ["step-1", "step-2"], "other"),
        ("default", "step-1", ["step-1"], "other"),  # the router was started after the first update
        ("1", "default", ["default"], "ahead"),
        ("²", "7", ["7"], "other"),  # a digit to str.isdigit, none to int
    ],
)
def test_how_a_version_stands_to_the_fleets(
    said: str | None, fleet: str | None, seen: list[str], fits: str
) -> None:
    assert fit(said, fleet, seen) == fits


def failed(judge: Judge, proof: Severity, now: float, *, began: float = 0, heard: float = NEVER) -> bool:
    return judge.failed(proof, began=began, now=now, heard=heard)


def test_a_good_probe_makes_good_for_everything() -> None:
    judge = Judge(3, 2)
    assert not failed(judge, "firm", 1)
    assert not failed(judge, "soft", 2)
    judge.passed()
    assert not failed(judge, "firm", 3)
    assert not failed(judge, "soft", 4)
    assert failed(judge, "silent", 5)


def test_answers_clear_soft_failures_and_not_firm_ones() -> None:
    judge = Judge(3, 2)
    failed(judge, "soft", 1)
    failed(judge, "soft", 2)
    assert not failed(judge, "soft", 4, heard=3)
    failed(judge, "firm", 6, heard=5)
    failed(judge, "firm", 8, heard=7)
    assert failed(judge, "firm", 10, heard=9)


def test_answer_at_the_moment_of_a_failure_is_not_later() -> None:
    """A loop's clock has milliseconds: the last bytes of a worker that dies come in the one of its end."""
    judge = Judge(2, 1)
    assert not failed(judge, "soft", 1.0, heard=1.0)
    assert failed(judge, "soft", 1.0, heard=1.0)


def test_silence_is_none_while_others_are_answered() -> None:
    judge = Judge(1, 1)
    assert not failed(judge, "silent", 30, began=10, heard=29)
    assert judge.verified
    assert not judge.failures
    assert failed(judge, "silent", 50, began=30, heard=29)


def test_after_any_failure_the_weights_are_to_be_looked_at() -> None:
    judge = Judge(3, 2, vouched_at=7)
    seen = [judge.verified]
    for happens in (lambda: failed(judge, "soft", 1), judge.passed, judge.trust, judge.distrust):
        happens()
        seen.append(judge.verified)
        assert judge.vouched_at is None
    assert seen == [True, False, False, True, False]


def test_the_next_probe_comes_soon_while_a_verdict_is_near() -> None:
    judge = Judge(2, 2)
    seen = [(judge.undecided, judge.returns)]
    refused = partial(failed, judge, "firm", 1)
    for happens in (refused, refused, refused, judge.passed, judge.passed, judge.distrust):
        happens()
        seen.append((judge.undecided, judge.returns))
    assert seen == [
        (False, True),
        (True, False),
        (False, False),  # quarantined, for hours perhaps
        (False, False),
        (True, False),
        (False, True),
        (False, False),
    ]


stories = st.lists(
    st.tuples(
        st.sampled_from(["firm", "soft", "silent", "none", "good", "heard"]),
        st.floats(0.001, 3),  # until it comes
        st.floats(0, 6),  # how long before that it began
    ),
    max_size=40,
)


@given(stories, st.integers(1, 5))
def test_the_verdict_is_that_of_the_whole_story(story: list[tuple[str, float, float]], limit: int) -> None:
    """Against a model that forgets nothing and counts anew each time."""
    judge = Judge(limit, 2)
    now, heard = 0.0, NEVER
    firm: list[float] = []  # when, since the last good probe
    weak: list[float] = []
    for what, pause, lasted in story:
        now += pause
        if what == "good":
            judge.passed()
            firm, weak = [], []
        elif what == "heard":
            heard = now
        else:
            verdict = judge.failed(cast(Severity, what), began=now - lasted, now=now, heard=heard)
            counts = what in ("firm", "soft") or (what == "silent" and heard < now - lasted)
            if counts:
                weak = [each for each in weak if each > heard]
                (firm if what == "firm" else weak).append(now)
            assert judge.failures == len(firm) + len(weak)
            assert verdict == (counts and judge.failures >= limit)
