from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from policies.asking import asking, ready
from router_core import Exchange, Worker
from router_core.cli import build, main
from routers import Start, answering
from slime_http.serving import serving
from slime_policies import Policy, RoundRobin, Settings
from slime_policies.contract import check_policy
from slime_policies.plugin import POLICIES
from slime_policies.settings import ASSIGNMENT_MODES


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_policy_keeps_the_contract(make: Callable[[Settings], Policy]) -> None:
    check_policy(lambda: make(Settings()))


@pytest.mark.parametrize("mode", ASSIGNMENT_MODES)
def test_each_mode_of_manual_keeps_the_contract(mode: str) -> None:
    check_policy(lambda: POLICIES["manual"](Settings(assignment_mode=mode)))


def test_the_contract_refuses_a_policy_that_knows_one_worker_only() -> None:
    class Stubborn:
        def __call__(self, exchange: Exchange, workers: Sequence[Worker]) -> Worker:
            return workers[0]

    with pytest.raises(AssertionError, match="share"):
        check_policy(Stubborn)


@pytest.mark.parametrize("name", ["least_inflight", "power_of_two"])
def test_the_busy_worker_is_left_alone(name: str) -> None:
    busy, calm = ready(9, 1)
    policy = POLICIES[name](Settings())
    assert {policy(asking(), [busy, calm]).url for _ in range(50)} == {calm.url}


@pytest.mark.parametrize(
    "name", ["least_inflight", "power_of_two", "cache_aware", "auto", "random", "round_robin"]
)
def test_no_worker_of_four_equal_ones_gets_half_of_new_prompts(name: str) -> None:
    workers = ready(3, 3, 3, 3)
    policy = POLICIES[name](Settings())
    chosen = [
        policy(asking(b'{"text": "%d %s"}' % (number, b"and so on " * 20)), workers) for number in range(400)
    ]
    assert max(map(chosen.count, workers)) < 200


def test_round_robin_gives_each_its_turn_though_one_leaves_and_one_joins() -> None:
    one, two, three = ready(0, 0, 0)
    policy = RoundRobin()
    assert [policy(asking(), [one, two]) for _ in range(3)] == [one, two, one]
    assert [policy(asking(), [two, three]) for _ in range(4)] == [three, two, three, two]
    assert policy(asking(), [one, two, three]) is one


def test_round_robin_remembers_workers_that_are_not_offered() -> None:
    one, two, three = ready(0, 0, 0)
    policy = RoundRobin()
    assert [policy(asking(), [one, two]) for _ in range(2)] == [one, two]
    assert policy(asking(), [one, three]) is three
    assert [policy(asking(), [one, two, three]) for _ in range(3)] == [one, two, three]


def test_round_robin_remembers_no_more_than_4096_workers_that_have_left() -> None:
    policy = RoundRobin()
    (one,) = ready(0)
    for _ in range(5000):
        assert policy(asking(), ready(0)) is not one
    assert policy(asking(), [one]) is one
    assert len(policy._last) <= 4096


@pytest.mark.anyio
async def test_the_flag_chooses_the_policy(start: Start) -> None:
    async with (
        serving(answering(b"one")) as one,
        serving(answering(b"two")) as two,
        start("--policy", "round_robin", "--disable-health-check") as running,
    ):
        for url in (one, two):
            await running.client.post("/add_worker", json={"url": url})
        answers = [(await running.client.get("/")).content for _ in range(4)]
    assert answers in ([b"one", b"two"] * 2, [b"two", b"one"] * 2)


def test_an_unknown_policy_is_refused_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policy", "cleverest"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(name in said for name in ["cleverest", *POLICIES])


@pytest.mark.parametrize(
    ("flag", "value", "policy"),
    [
        ("--cache-threshold", "1.5", "cache_aware"),
        ("--cache-threshold", "nan", "cache_aware"),
        ("--balance-abs-threshold", "-1", "cache_aware"),
        ("--balance-rel-threshold", "0.5", "cache_aware"),
        ("--max-tree-size", "0", "cache_aware"),
        ("--max-idle-secs", "0", "manual"),
    ],
)
def test_a_value_that_cannot_work_is_told(
    flag: str, value: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--policy", policy, flag, value]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slime-router: {flag}: wanted ")
    assert said.count("\n") == 1


def test_a_flag_for_another_policy_is_taken_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(["--policy", "random", "--balance-abs-threshold", "0"])
    assert caplog.messages == [
        "--balance-abs-threshold has no effect: it is for policy auto or cache_aware or bucket"
    ]
    caplog.clear()
    build(["--balance-abs-threshold", "0"])  # as slime starts the gateway, whose default is cache_aware
    build(["--policy", "cache_aware", "--balance-abs-threshold", "0"])
    assert caplog.messages == []
