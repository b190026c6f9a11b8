"""``auto``: sessions keep their worker until it is overloaded; caches decide for all other requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from policies.asking import Clock, asking, generate, ready, words
from router_core import Exchange, Worker
from router_core.cli import build
from routers import Start, answering
from slime_http.serving import serving
from slime_policies import Auto, CacheAware, LeastInflight, Settings
from slime_policies.plugin import POLICIES, PairPolicies, make_plugin
from slime_testing import Running


def turn(session: str, text: str) -> Exchange:
    return asking(b'{"sampling_params": {}, "text": "%s"}' % text.encode(), session=session)


def test_session_stays_while_its_worker_is_a_little_busier() -> None:
    workers = ready(0, 0, 0)
    policy = Auto(Settings())
    first = policy(turn("a", words(1)), workers)
    first.in_flight = 4
    assert [policy(turn("a", words(1) + words(2, 100 * size)), workers) for size in range(9)] == [first] * 9
    assert policy.moves == 0


@pytest.mark.parametrize(("turns", "ahead"), [(1, 11), (2, 8), (3, 7), (20, 7)])
def test_session_moves_when_waiting_costs_more_than_a_second_prefill(turns: int, ahead: int) -> None:
    """The margin is 960, a request 240. 2,000 bytes are 500 tokens, each counts as 3 divided by 1, 2 or 3 turns."""
    workers = home, other = ready(0, 1)
    clock = Clock()
    for more, wanted in ((ahead - 1, home), (ahead, other)):
        policy = Auto(Settings(), clock)
        home.in_flight, other.in_flight = 0, 1
        for _ in range(turns):
            assert policy(turn("a", words(1)), workers) is home
        clock.now += 1
        home.in_flight, other.in_flight = 9 + more, 9
        assert policy(turn("a", words(1)), workers) is wanted
        assert policy.moves == (wanted is other)


def test_long_conversation_stays_where_a_short_one_moves() -> None:
    workers = home, other = ready(0, 1)
    clock = Clock()
    policy = Auto(Settings(), clock)
    for name, size in (("short", 2000), ("long", 20_000)):
        assert policy(turn(name, words(size, size)), [home]) is home
    policy(turn("elsewhere", words(3)), workers)
    clock.now += 10
    home.in_flight, other.in_flight = 30, 0
    assert policy(turn("long", words(20_000, 20_000)), workers) is home
    assert policy(turn("short", words(2000)), workers) is other


def test_moved_session_does_not_move_back_for_a_small_gain() -> None:
    workers = home, other = ready(0, 1)
    clock = Clock()
    policy = Auto(Settings(), clock)
    policy(turn("a", words(1)), workers)
    home.in_flight = 40
    assert policy(turn("a", words(1)), workers) is other
    clock.now += 1
    home.in_flight, other.in_flight = 0, 4
    assert policy(turn("a", words(1)), workers) is other
    assert policy.moves == 1


def test_thresholds_of_the_gateway_move_no_session() -> None:
    """Slime's launch line has the threshold 0."""
    workers = home, other = ready(0, 1)
    policy = Auto(Settings(balance_abs_threshold=0), Clock())
    long = words(1, 40_000)
    policy(turn("a", long), workers)
    home.in_flight, other.in_flight = 10, 0
    assert policy(turn("a", long), workers) is home


def test_session_has_nothing_to_lose_after_its_worker_dropped_the_cache() -> None:
    workers = home, other = ready(0, 1)
    policy = Auto(Settings(), Clock())
    long = words(1, 40_000)
    policy(turn("a", long), workers)
    home.in_flight, other.in_flight = 8, 0
    assert policy(turn("a", long), workers) is home
    policy.forget(home)
    assert policy(turn("a", long), workers) is other


def test_session_whose_worker_is_not_offered_gets_and_keeps_another() -> None:
    one, two, three = ready(0, 0, 0)
    policy = Auto(Settings())
    first = policy(turn("a", words(1)), [one, two])
    left = [worker for worker in (one, two, three) if worker is not first]
    second = policy(turn("a", words(1)), left)
    assert second in left
    assert [policy(turn("a", words(1)), [one, two, three]) for _ in range(3)] == [second] * 3


def test_new_session_avoids_the_worker_that_got_other_sessions_lately() -> None:
    """Their clients are busy between two turns, so none of them has a request in flight."""
    workers = one, two = ready(0, 0)
    clock = Clock()
    policy = Auto(Settings(), clock)
    for seed in range(4):
        policy(turn(f"of one {seed}", words(seed)), [one])  # no choice, so it does not count
    policy(turn("a choice", words(4)), workers)
    placed = [policy(turn(f"of two {seed}", words(seed)), [two]) for seed in range(5, 9)]
    assert placed == [two] * 4
    clock.now += 1
    two.in_flight, one.in_flight = 0, 1
    assert policy(turn("next", words(9)), workers) is one
    clock.now += 60
    assert policy(turn("a minute later", words(10)), workers) is two


def test_sessions_of_workers_that_left_are_not_counted_for_ever() -> None:
    policy = Auto(Settings(), Clock())
    for number in range(200):
        workers = [Worker(f"http://10.0.{number}.{place}:30000") for place in range(2)]
        policy(turn(f"session {number}", words(number, 100)), workers)
    assert len(policy._cache_aware._recent._counts) <= 5


def test_strict_session_affinity_leaves_sessions_to_the_pool() -> None:
    policy = Auto(Settings(session_affinity="strict"))
    assert not policy.places_sessions
    one, two = ready(0, 0)
    assert [policy(turn("a", words(1)), [one, two]) for _ in range(2)] == [one, one]  # by its prompt
    one.in_flight = 40
    assert policy(turn("a", words(1)), [one, two]) is two


def test_requests_without_a_session_follow_their_prompts() -> None:
    workers = ready(0, 0, 0, 0)
    policy = Auto(Settings())
    first = policy(generate(words(1)), workers)
    policy(generate(words(2)), workers)
    assert [policy(generate(words(1) + words(3, 300)), workers) for _ in range(3)] == [first] * 3


def test_nothing_is_noted_while_there_is_no_choice() -> None:
    one, two = ready(0, 0)
    policy = Auto(Settings())
    alone = generate(words(1))
    assert policy(alone, [one]) is one
    assert not policy.expects(alone)
    assert policy(turn("a", words(2)), [one]) is one
    assert policy(turn("a", words(2)), [one]) is one
    both = generate(words(1))
    policy(both, [one, two])
    assert policy.expects(both)
    assert policy(turn("a", words(2)), [one, two]) is one


def test_requests_of_a_session_without_a_prompt_change_nothing() -> None:
    workers = home, other = ready(0, 1)
    policy = Auto(Settings(), Clock())
    policy(turn("a", words(1)), workers)
    home.in_flight = 40
    assert policy(asking(b'{"rid": "1"}', session="a"), workers) is home
    assert policy(turn("a", words(1)), workers) is other


def test_oldest_sessions_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_policies.auto._MAX_SESSIONS", 2)
    workers = ready(0, 0, 0)
    policy = Auto(Settings())
    first = {name: policy(turn(name, words(ord(name))), workers) for name in "abc"}
    for worker in workers:
        worker.in_flight = 0 if worker is first["b"] else 3
    assert policy(turn("c", words(ord("c"))), workers) is first["c"]
    assert policy(turn("a", words(9)), workers) is first["b"]  # as a new one


def test_auto_in_pairs_is_a_policy_for_each_type() -> None:
    options = build(["--pd-disaggregation", "--policy", "auto"])[0].options
    plugin = make_plugin(options)
    assert isinstance(plugin, PairPolicies)
    assert isinstance(plugin.policies["prefill"], CacheAware)
    assert isinstance(plugin.policies["decode"], LeastInflight)


@pytest.mark.anyio
@pytest.mark.parametrize("name", POLICIES)
async def test_router_without_workers_says_so_under_each_policy(start: Start, name: str) -> None:
    async with start("--policy", name) as running:
        answer = await running.client.post("/generate", json={"text": "a"}, headers={"x-session-id": "a"})
    assert answer.status_code == 503
    assert "no worker" in answer.json()["error"]["message"]


# through a router


@asynccontextmanager
async def routed(start: Start, *flags: str) -> AsyncIterator[Running]:
    async with (
        serving(answering(b"0")) as zero,
        serving(answering(b"1")) as one,
        start("--policy", "auto", "--disable-health-check", *flags) as running,
    ):
        for url in (zero, one):
            await running.client.post("/add_worker", json={"url": url})
        yield running


async def ask(running: Running, session: str, prompt: str) -> int:
    headers = {"x-session-id": session}
    answer = await running.client.post("/generate", json={"text": prompt}, headers=headers)
    return int(answer.content)


@pytest.mark.anyio
@pytest.mark.parametrize("affinity", ["soft", "strict"])
async def test_session_leaves_an_overloaded_worker_unless_affinity_is_strict(
    start: Start, affinity: str
) -> None:
    async with routed(start, "--session-affinity", affinity) as running:
        first = await ask(running, "a", words(1))
        home = list(running.router.pool)[first]
        home.in_flight += 40
        moved = affinity == "soft"
        assert await ask(running, "a", words(1)) == (1 - first if moved else first)
        home.in_flight -= 40
        metrics = (await running.client.get("/metrics")).text
    assert ("slime_session_moves_total 1.0" in metrics or "slime_session_moves_total 1\n" in metrics) == moved


@pytest.mark.anyio
async def test_sessions_of_a_plugin_that_chooses_workers_stay(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last_one.py").write_text(
        '"""Takes the last."""\nfrom router_core import hookimpl\nasked = []\n'
        "@hookimpl\ndef select_worker(exchange, workers):\n    asked.append(1)\n    return workers[-1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with routed(start, "--middleware-paths", "last_one") as running:
        assert running.router.pool.keeps_sessions
        assert [await ask(running, "a", words(1)) for _ in range(3)] == [1, 1, 1]
    import last_one  # type: ignore[import-not-found]  # written above

    assert len(last_one.asked) == 1
