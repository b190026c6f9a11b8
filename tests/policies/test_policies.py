from __future__ import annotations

from collections.abc import Callable

import pytest

from router_core.cli import main
from router_core.serving import serving
from router_core.workers import Worker
from routers import Start, answering
from slime_policies import Policy, RoundRobin
from slime_policies.contract import check_policy
from slime_policies.plugin import POLICIES


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_policy_keeps_the_contract(make: Callable[[], Policy]) -> None:
    check_policy(make)


def test_the_contract_refuses_a_policy_that_knows_one_worker_only() -> None:
    class Stubborn:
        def __call__(self, workers: list[Worker]) -> Worker:
            return workers[0]

    with pytest.raises(AssertionError, match="share"):
        check_policy(Stubborn)  # type: ignore[arg-type]  # list is narrower than Sequence; it is wrong anyway


@pytest.mark.parametrize("name", ["least_inflight", "power_of_two"])
def test_the_busy_worker_is_left_alone(name: str) -> None:
    busy = Worker("http://127.0.0.1:1", state="ready", in_flight=9)
    calm = Worker("http://127.0.0.1:2", state="ready", in_flight=1)
    assert {POLICIES[name]()([busy, calm]).url for _ in range(50)} == {calm.url}


def test_round_robin_gives_each_its_turn_though_one_leaves_and_one_joins() -> None:
    one, two, three = (Worker(f"http://127.0.0.1:{port}", state="ready") for port in (1, 2, 3))
    policy = RoundRobin()
    assert [policy([one, two]) for _ in range(3)] == [one, two, one]
    assert [policy([two, three]) for _ in range(4)] == [three, two, three, two]
    assert policy([one, two, three]) is one


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
