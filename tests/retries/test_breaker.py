"""The breaker's state machine, held against a plain list of all that happened."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from slime_retries import Breaker, Thresholds

THRESHOLDS = Thresholds(failures=3, successes=2, timeout_s=5, window_s=10)


class BreakerMachine(RuleBasedStateMachine):
    """The model keeps every event with its time and derives the state from the beginning, each time anew."""

    attempts: Any = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(THRESHOLDS, lambda: self.now)
        self.events: list[tuple[float, str, object]] = []

    def tell(self, event: str, attempt: object = None) -> None:
        self.events.append((self.now, event, attempt))
        getattr(self.breaker, event)(*([attempt] if attempt is not None else []))

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=attempts)
    def begin(self) -> object:
        attempt = object()
        if self.breaker.admits:
            self.tell("begin", attempt)
        return attempt

    @rule(attempt=consumes(attempts))
    def fail(self, attempt: object) -> None:
        self.tell("failed", attempt)

    @rule(attempt=consumes(attempts))
    def succeed(self, attempt: object) -> None:
        self.tell("succeeded", attempt)

    @rule(attempt=consumes(attempts))
    def give_up(self, attempt: object) -> None:
        self.tell("gave_up", attempt)

    @precondition(lambda self: self.breaker.state == "open")
    @rule()
    def wait(self) -> None:
        self.tell("wait_over")

    def expected(self) -> tuple[str, bool]:
        """State, and whether it admits an attempt, as the sentences of the documentation have it."""
        state, since = "closed", 0
        for number, (now, event, attempt) in enumerate(self.events):
            before = self.events[since:number]
            if state == "closed":
                row = [(now, event), *((then, what) for then, what, _ in reversed(before) if what != "begin")]
                row = [one for one in row if one[1] != "gave_up"][: THRESHOLDS.failures]
                if [what for _, what in row] == ["failed"] * THRESHOLDS.failures and row[0][0] - row[-1][
                    0
                ] <= THRESHOLDS.window_s:
                    state, since = "open", number + 1
            elif state == "open":
                if event == "wait_over":
                    state, since = "half-open", number + 1
            elif event != "begin" and any(one[1:] == ("begin", attempt) for one in before):
                if event == "failed":
                    state, since = "open", number + 1
                elif event == "succeeded":
                    probes = {probe for _, what, probe in before if what == "begin"}
                    good = [one for _, what, one in before if what == "succeeded" and one in probes]
                    if len(good) + 1 == THRESHOLDS.successes:
                        state, since = "closed", number + 1
        now_on = self.events[since:]
        begun = [attempt for _, event, attempt in now_on if event == "begin"]
        ended = [attempt for _, event, attempt in now_on if event != "begin"]
        under_way = [attempt for attempt in begun if attempt not in ended]
        return state, state == "closed" or (state == "half-open" and not under_way)

    @invariant()
    def agrees(self) -> None:
        assert (self.breaker.state, self.breaker.admits) == self.expected()


BreakerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBreaker = BreakerMachine.TestCase


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(Thresholds(failures=2, successes=1), lambda: 0.0)


def test_breaker_forgets_failures_of_a_worker_that_answered_since(breaker: Breaker) -> None:
    breaker.failed(object())
    after_the_failure = breaker.untroubled
    breaker.succeeded(object())
    assert (after_the_failure, breaker.untroubled) == (False, True)


def test_a_probe_that_is_given_up_leaves_its_place_to_another_one(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed(object())
    breaker.wait_over()
    probe = object()
    breaker.begin(probe)
    admitted = []
    for attempt in (object(), probe):
        breaker.gave_up(attempt)
        admitted.append(breaker.admits)
    assert admitted == [False, True]
    assert breaker.state == "half-open"


def test_request_sent_before_it_opened_neither_opens_nor_closes_it(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.failed(object())
    breaker.wait_over()
    breaker.succeeded(object())
    breaker.failed(object())
    assert breaker.state == "half-open"
    assert breaker.admits


def test_successes_before_a_failure_do_not_count_after_it() -> None:
    breaker = Breaker(Thresholds(failures=1, successes=2), lambda: 0.0)
    breaker.failed(object())
    states = []
    for outcome in (breaker.succeeded, breaker.failed, breaker.succeeded):
        breaker.wait_over()
        probe = object()
        breaker.begin(probe)
        outcome(probe)
        states.append(breaker.state)
    assert states == ["half-open", "open", "half-open"]
