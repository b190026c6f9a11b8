"""The check of weights in the answers: an engine that was away explains old weights only where nobody could know."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest

from chaos.faults import Fault, Faults
from chaos.fleet import Trainer, Update


@pytest.fixture
def faults() -> Faults:
    return Faults(cast(Any, None), cast(Any, None), seed=1, pace=1.0)


def _killed(url: str, began: float, restarted_at: float) -> Fault:
    return Fault("killed (-9)", f"the engine at {url}", url, began, restarted_at=restarted_at)


def test_restart_explains_first_weights_of_requests_that_were_under_way(faults: Faults) -> None:
    faults.done.append(_killed("a", 10.0, 11.0))
    assert faults.restarted_between(10.5, 11.5)
    assert not faults.restarted_between(11.5, 12.0)  # the engine was there, and was to be checked


def test_weights_are_lost_when_each_engine_that_took_them_was_killed(faults: Faults) -> None:
    faults.done += [_killed("a", 10.0, 11.0), _killed("b", 20.0, 21.0), _killed("c", 5.0, 6.0)]
    assert faults.all_killed({"a", "b"}, 9.0, 30.0)
    assert not faults.all_killed({"a", "b"}, 9.0, 15.0)  # too early
    assert not faults.all_killed({"a", "b", "c"}, 9.0, 30.0)  # one took the weights after its restart
    assert not faults.all_killed({"a", "b", "d"}, 9.0, 30.0)  # one was never killed
    assert not faults.all_killed(set(), 9.0, 30.0)


def test_a_stopped_engine_keeps_its_weights(faults: Faults) -> None:
    faults.done.append(Fault("stopped (SIGSTOP)", "the engine at a", "a", 10.0))
    assert not faults.all_killed({"a"}, 9.0, 30.0)


def test_trainer_tells_the_weights_that_a_request_may_meet() -> None:
    trainer = Trainer(cast(Any, None), Random(0))
    trainer.updates += [
        Update(2, 10.0, 11.0, succeeded=True, takers=frozenset({"a"})),
        Update(3, 20.0, 21.0, succeeded=False),
        Update(4, 30.0, 31.0, succeeded=True, takers=frozenset({"b"})),
    ]
    assert trainer.allowed(5.0, 9.0) == (1, 1)
    assert trainer.allowed(5.0, 10.5) == (1, 2)
    assert trainer.allowed(12.0, 25.0) == (2, 3)
    assert trainer.last_before(29.0).takers == {"a"}
    assert trainer.allowed(32.0, 33.0) == (4, 4)
