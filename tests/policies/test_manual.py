"""``manual``: where a session begins. That it stays there is the core's work, for each policy."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.asking import asking, ready
from routers import Start, answering
from slime_http.serving import serving
from slime_policies import Manual, Settings

GROUPS = Settings(assignment_mode="min_group", max_idle_secs=100)


def test_min_load_takes_the_idle_worker() -> None:
    busy, calm = ready(3, 2)
    policy = Manual(Settings(assignment_mode="min_load"))
    assert {policy(asking(session=str(number)), [busy, calm]) for number in range(20)} == {calm}


def test_min_group_gives_each_worker_as_many_sessions() -> None:
    workers = ready(9, 0, 3)
    policy = Manual(GROUPS)
    chosen = Counter(policy(asking(session=str(number)), workers).url for number in range(30))
    assert set(chosen.values()) == {10}


def test_min_group_moves_the_sessions_of_a_worker_that_is_gone() -> None:
    one, two, three = workers = ready(0, 0, 0)
    policy = Manual(GROUPS)
    places = {str(number): policy(asking(session=str(number)), workers) for number in range(30)}
    for session, place in places.items():
        if place is one:
            assert policy(asking(session=session), [two, three]) in (two, three)
    assert [policy(asking(session=f"new {number}"), workers) for number in range(15)] == [one] * 15


def test_min_group_stops_counting_what_was_assigned_long_ago() -> None:
    now = 0.0
    one, two = ready(0, 0)
    policy = Manual(GROUPS, clock=lambda: now)
    for number in range(10):
        policy(asking(session=str(number)), [one])
    now = 50.0
    for number in range(5):
        policy(asking(session=f"later {number}"), [two])
    now = 101.0
    assert [policy(asking(session=f"now {number}"), [one, two]) for number in range(5)] == [one] * 5


def test_requests_without_a_session_count_for_no_worker() -> None:
    workers = ready(0, 0)
    policy = Manual(GROUPS)
    assert {policy(asking(), workers) for _ in range(50)} == set(workers)
    chosen = Counter(policy(asking(session=str(number)), workers).url for number in range(10))
    assert set(chosen.values()) == {5}


@pytest.mark.anyio
async def test_a_routing_key_keeps_its_worker(start: Start) -> None:
    async with (
        serving(answering(b"one")) as one,
        serving(answering(b"two")) as two,
        start("--policy", "manual", "--assignment-mode", "min_group", "--disable-health-check") as running,
    ):
        for url in (one, two):
            await running.client.post("/add_worker", json={"url": url})
        answers = {
            key: {(await running.client.get("/", headers={"X-SMG-Routing-Key": key})).text for _ in range(5)}
            for key in "abcdefgh"
        }
    assert {len(places) for places in answers.values()} == {1}
    assert Counter(place for places in answers.values() for place in places) == {"one": 4, "two": 4}
