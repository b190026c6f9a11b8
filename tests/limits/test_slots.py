"""The slots against a plain model: a list of who holds one and a list of who waits."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router_core.errors import HTTPError, ShuttingDown
from slime_limits.slots import Place, QueueFull, RefilledSlots, Slots


class SlotMachine(RuleBasedStateMachine):
    """Requests by number, in the order in which they came; the model keeps nothing but numbers."""

    @initialize(limit=st.integers(1, 4), queue_size=st.integers(0, 5))
    def begin(self, limit: int, queue_size: int) -> None:
        self.slots = Slots(limit, queue_size)
        self.places: list[Place] = []
        self.called: list[int] = []
        self.closed = False
        self.holding: list[int] = []
        self.waiting: list[int] = []
        self.told: list[int] = []

    @rule()
    def come(self) -> None:
        refusal: type[HTTPError] | None = None
        if len(self.holding) == self.slots.limit:
            if self.closed:
                refusal = ShuttingDown
            elif len(self.waiting) == self.slots.queue_size:
                refusal = QueueFull
        if refusal is not None:
            with pytest.raises(refusal):
                self.slots.take()
            return
        number = len(self.places)
        (self.waiting if len(self.holding) == self.slots.limit else self.holding).append(number)
        place = self.slots.take()
        place.call = lambda: self.called.append(number)
        self.places.append(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """The request holds a slot, waits for one, or has left before."""
        number = data.draw(st.integers(0, len(self.places) - 1))
        if number in self.holding:
            self.holding.remove(number)
            if self.waiting:
                self.told.append(self.waiting[0])
                self.holding.append(self.waiting.pop(0))
        elif number in self.waiting:
            self.waiting.remove(number)
        self.places[number].leave()

    @rule()
    def close(self) -> None:
        self.closed = True
        self.told += self.waiting
        self.waiting.clear()
        self.slots.close()

    @invariant()
    def both_say_the_same(self) -> None:
        assert self.slots.held == len(self.holding)
        assert self.slots.waiting == len(self.waiting)
        assert [number for number, place in enumerate(self.places) if place.held] == sorted(self.holding)
        assert self.called == self.told

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        assert not self.waiting or self.slots.held == self.slots.limit


SlotMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestSlotted = SlotMachine.TestCase


class Refilled(RuleBasedStateMachine):
    """The SGLang gateway's bucket of tokens, and a list of who waits: one that comes takes a token, one that leaves
    puts it back, and more come with time. All times and rates are exact in binary.
    """

    @initialize(limit=st.integers(1, 4), queue_size=st.integers(0, 5), per_s=st.sampled_from([1, 2, 8]))
    def begin(self, limit: int, queue_size: int, per_s: int) -> None:
        self.now = 1000.0
        self.per_s = per_s
        self.slots = RefilledSlots(limit, queue_size, per_s, lambda: self.now)
        self.places: list[Place] = []
        self.called: list[int] = []
        self.tokens = Fraction(limit)
        self.due = Fraction(0)
        self.holding: set[int] = set()
        self.waiting: list[int] = []
        self.told: list[int] = []

    def put(self, tokens: Fraction) -> None:
        """More of them: to those that wait first, and then no more than fit."""
        self.tokens += tokens
        while self.waiting and self.tokens >= 1:
            self.told.append(self.waiting[0])
            self.holding.add(self.waiting.pop(0))
            self.tokens -= 1
        self.tokens = min(self.tokens, Fraction(self.slots.limit))

    def refill(self) -> None:
        self.put(self.due)
        self.due = Fraction(0)

    @rule(eighths=st.integers(0, 40))
    def time_passes(self, eighths: int) -> None:
        self.now += eighths / 8
        self.due += Fraction(eighths, 8) * self.per_s

    @rule()
    def look(self) -> None:
        self.refill()
        self.slots.refill()

    @rule()
    def come(self) -> None:
        self.refill()
        if self.tokens < 1 and len(self.waiting) == self.slots.queue_size:
            with pytest.raises(QueueFull):
                self.slots.take()
            return
        number = len(self.places)
        if self.tokens >= 1:
            self.tokens -= 1
            self.holding.add(number)
        else:
            self.waiting.append(number)
        place = self.slots.take()
        place.call = lambda: self.called.append(number)
        self.places.append(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """The request holds a slot, waits for one, or has left before."""
        number = data.draw(st.integers(0, len(self.places) - 1))
        if number in self.holding:
            self.holding.remove(number)
            self.put(Fraction(1))
        elif number in self.waiting:
            self.waiting.remove(number)
        self.places[number].leave()

    @invariant()
    def both_say_the_same(self) -> None:
        assert self.slots.waiting == len(self.waiting)
        assert {number for number, place in enumerate(self.places) if place.held} == self.holding
        assert self.called == self.told
        assert self.slots.held == self.slots.limit - math.floor(self.tokens)

    @invariant()
    def who_waits_knows_when_the_next_one_comes(self) -> None:
        if self.waiting:
            assert self.slots.next_s() == max(Fraction(0), 1 - self.tokens - self.due) / self.per_s


Refilled.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRefilled = Refilled.TestCase


def test_a_long_line_is_served_in_time_that_does_not_grow_with_it() -> None:
    """A hundred thousand who wait: quadratic work would take minutes."""
    slots = Slots(1, 100_000)
    places = [slots.take() for _ in range(100_001)]
    for place in places[1::2]:
        place.leave()
    for place in places[::2]:
        assert place.held
        place.leave()
    assert (slots.held, slots.waiting) == (0, 0)
