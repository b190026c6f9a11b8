"""The version that workers agree on, and the workers that may be set aside."""

from __future__ import annotations

from typing import Any

import pytest

from router_core import Worker
from router_core.weights import WeightVersions
from router_core.workers import Hold
from slime_health.agreement import agreed, newer_than_the_fleet, others_serve, stands_in

TORN = {"control": Hold("a call failed", "stale")}


def workers(*about: tuple[str, str | None] | tuple[str, str | None, dict[str, Any]]) -> list[Worker]:
    made = []
    for number, (state, said, *more) in enumerate(about):
        worker = Worker(f"http://127.0.0.1:{number + 1}", said_version=said)
        if state != "ready":
            worker.holds["a test"] = Hold("a test", state)  # type: ignore[arg-type]  # one of the states
        for name, value in (more[0] if more else {}).items():
            setattr(worker, name, value)
        made.append(worker)
    return made


def weights(*had: str) -> WeightVersions:
    known = WeightVersions()
    for version in had:
        known.move(version, "test")
    return known


@pytest.mark.parametrize(
    ("fleet", "version"),
    [
        ([("ready", "7"), ("ready", "7")], "7"),
        ([("ready", "7"), ("ready", "6")], None),
        ([("ready", "7"), ("stale", "6"), ("quarantined", "6"), ("draining", "6"), ("joining", None)], "7"),
        ([("ready", "7"), ("ready", None)], "7"),
        ([("ready", None), ("stale", "7")], None),
        ([("stale", "7"), ("stale", "7"), ("quarantined", "6")], "7"),
        ([("stale", "7"), ("stale", "6")], None),
        ([("stale", "7"), ("stale", "6", {"holds": TORN})], "7"),
        ([("stale", "6", {"holds": TORN})], None),
        ([], None),
    ],
)
def test_version_that_all_agree_on(fleet: list[tuple[str, str | None]], version: str | None) -> None:
    assert agreed(workers(*fleet)) == version


@pytest.mark.parametrize(
    ("said", "newest"),
    [
        (["7", "6"], "7"),
        (["7", "6", "6"], None),
        (["7", "8"], "8"),
        (["8", "7"], "8"),
        (["7", "5", "5"], None),
        (["default", "6"], None),
        (["7", None], "7"),
        (["7", "6", None, None, None], "7"),  # some engines never name a version
        ([], None),
    ],
)
def test_newer_version_needs_half_of_the_workers(said: list[str | None], newest: str | None) -> None:
    there = workers(*(("ready", version) for version in said), ("stale", "9"), ("quarantined", "9"))
    assert newer_than_the_fleet(there, weights("5", "6")) == newest


@pytest.mark.parametrize(
    ("other", "stands"),
    [
        (("ready", "7"), True),
        (("ready", "8"), True),
        (("ready", "6"), False),
        (("ready", None), False),
        (("stale", "7"), False),
        (("ready", "7", {"holds": {"circuit breaker": Hold("open", "ready")}}), False),
        (("ready", "7", {"holds": TORN}), False),
        (("ready", "7", {"worker_type": "prefill"}), False),  # it cannot do what a decode worker does
    ],
)
def test_worker_with_the_fleets_weights_stands_in(
    other: tuple[str, str | None] | tuple[str, str | None, dict[str, Any]], stands: bool
) -> None:
    there = workers(("ready", "6"), other)
    assert stands_in(there, there[0], weights("6", "7")) is stands


def test_worker_does_not_stand_in_for_itself() -> None:
    there = workers(("ready", "7"))
    assert not stands_in(there, there[0], weights("7"))
    assert not others_serve(there, there[0])
