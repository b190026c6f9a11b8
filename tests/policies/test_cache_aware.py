"""``cache_aware``: where the prompt is known, as long as nobody has too much to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from policies.asking import Clock, asking, generate, ready, words
from router_core import Exchange, Worker
from router_core.workers import WorkerType
from routers import Start, answering
from slime_http.serving import serving
from slime_policies import CacheAware, Settings
from slime_testing import Running


def test_a_conversation_goes_on_where_it_began() -> None:
    workers = ready(0, 0, 0, 0)
    policy = CacheAware(Settings())
    for seed in range(20):
        history = words(seed)
        first = policy(generate(history), workers)
        for turn in range(5):
            history += words(1000 * seed + turn, 500)
            assert policy(generate(history), workers) is first


def test_of_equal_workers_the_one_chosen_longest_ago_gets_a_new_prompt() -> None:
    workers = ready(0, 0, 0)
    policy = CacheAware(Settings())
    chosen = [policy(generate(words(seed)), workers) for seed in range(9)]
    assert chosen == chosen[:3] * 3
    assert {*chosen} == {*workers}


def test_new_prompts_go_to_the_fewest_in_flight_whatever_these_know() -> None:
    one, two = ready(1, 0)
    policy = CacheAware(Settings())
    policy(generate(words(1, 40_000)), [two])
    assert [policy(generate(words(seed)), [one, two]) for seed in range(2, 12)] == [two] * 10


@pytest.mark.parametrize(
    ("kind", "session", "avoided"),
    [
        ("regular", "next", True),
        ("prefill", "next", True),
        ("decode", "next", False),
        ("regular", None, False),
    ],
)
def test_new_session_avoids_the_worker_that_got_the_last_sessions(
    kind: WorkerType, session: str | None, avoided: bool
) -> None:
    """Their clients are busy between two turns. A decode worker is chosen for each request of a session."""
    workers = one, two = [Worker(f"http://127.0.0.1:{port}", kind) for port in (1, 2)]
    policy = CacheAware(Settings(), clock := Clock())
    for seed in range(3):
        policy(asking(generate(words(seed)).request.body, session=f"session {seed}"), [two])
    clock.now += 1
    one.in_flight = 1
    next_request = asking(generate(words(3)).request.body, session=session)
    assert policy(next_request, workers) is (one if avoided else two)


def test_prompts_spread_over_equal_workers() -> None:
    workers = ready(0, 0, 0, 0)
    policy = CacheAware(Settings())
    chosen = [policy(generate(words(seed)), workers) for seed in range(40)]
    assert {chosen.count(worker) for worker in workers} == {10}


@pytest.mark.parametrize(("ahead", "kept"), [(1, True), (5, True), (6, False)])
def test_loads_outweigh_a_known_prefix_from_some_requests_on(ahead: int, kept: bool) -> None:
    """The 1,792 bytes of the longest prefix are 448 tokens, each counts as 3; a request counts as 240."""
    busy, calm = workers = ready(20 + ahead, 20)
    clock = Clock()
    policy = CacheAware(Settings(), clock)
    policy(generate(words(1)), [busy])
    clock.now += 1  # the prompt has been computed
    assert policy(generate(words(1)), workers) is (busy if kept else calm)


def test_prompts_that_wait_for_their_computation_count_as_load() -> None:
    one, two = workers = ready(0, 1)
    clock = Clock()
    policy = CacheAware(Settings(), clock)
    one.in_flight = 1
    policy(generate(words(1, 64_000)), [one])  # 16,000 tokens: a second
    assert {policy(generate(words(seed, 400)), workers) for seed in range(2, 8)} == {two}
    clock.now += 2
    assert policy(generate(words(9, 400)), workers) is one


def test_a_hot_prefix_is_copied_to_all_workers_before_one_has_too_much() -> None:
    workers = ready(*[0] * 8)
    policy = CacheAware(Settings(), Clock())
    system = words(1, 33_000)
    for number in range(160):  # none of them ends
        policy(generate(system + words(number, 400)), workers).in_flight += 1
    loads = [worker.in_flight for worker in workers]
    assert max(loads) <= 1.5 * min(loads), loads


def test_a_group_of_samples_stays_on_one_worker_beside_other_groups() -> None:
    workers = ready(*[0] * 8)
    clock = Clock()
    policy = CacheAware(Settings(), clock)
    for group in range(64):
        prompt = words(group, 4000)
        chosen = set()
        for _ in range(8):
            worker = policy(generate(prompt), workers)
            worker.in_flight += 1
            chosen.add(worker)
        clock.now += 1
        assert len(chosen) == 1
    loads = [worker.in_flight for worker in workers]
    assert max(loads) <= 1.5 * min(loads), loads


@pytest.mark.parametrize(("loads", "kept"), [((65, 0), False), ((64, 0), True), ((200, 135), True)])
def test_a_given_threshold_of_the_gateway_outweighs_the_prefix(loads: tuple[int, int], kept: bool) -> None:
    """Too much: by more than 64 requests and by more than half, both."""
    busy, calm = workers = ready(*loads)
    policy = CacheAware(Settings(balance_abs_threshold=64))
    long = words(1, 800_000)
    policy(generate(long), [busy])
    assert policy(generate(long), workers) is (busy if kept else calm)


def test_the_thresholds_of_the_balance_are_the_settings() -> None:
    busy, calm = workers = ready(3, 1)
    for settings, kept in (
        (Settings(balance_abs_threshold=1), False),
        (Settings(balance_abs_threshold=2), True),
        (Settings(balance_abs_threshold=1, balance_rel_threshold=3), True),
    ):
        policy = CacheAware(settings)
        policy(generate(words(1)), [busy])
        assert policy(generate(words(1)), workers) is (busy if kept else calm)


@pytest.mark.parametrize(("threshold", "known"), [(0.3, True), (0.8, False), (0.0, True)])
def test_a_shared_beginning_counts_from_the_threshold_on(threshold: float, known: bool) -> None:
    one, two = ready(0, 0)
    policy = CacheAware(Settings(cache_threshold=threshold))
    system = words(1, 3000)
    policy(generate(system + words(2)), [one])
    assert policy(generate(system + words(3)), [one, two]) is (one if known else two)


def test_the_longest_known_beginning_wins() -> None:
    one, two = ready(0, 0)
    policy = CacheAware(Settings())
    text = words(1, 4000)
    policy(generate(text[:2000]), [one])
    policy(generate(text[:3500]), [two])
    assert policy(generate(text), [one, two]) is two


@pytest.mark.parametrize(
    "body",
    [
        b'{"rid": "%d", "text": "%s"}',
        b'{"rid": "%d", "input_ids": [%s]}',
        b'{"user": "%d", "messages": [{"role": "user", "content": "%s"}]}',
        b'{"session": %d, "model": "m", "prompt" : "%s"}',
        b'{"rid": "%d", "tools": "' + b"x" * 5000 + b'", "messages": "%s"}',
    ],
)
def test_members_before_the_prompt_do_not_matter(body: bytes) -> None:
    workers = ready(0, 0, 0, 0)
    policy = CacheAware(Settings(cache_threshold=0.6))
    prompt = words(1, 40_000).encode()
    first = policy(asking(body % (1, prompt)), workers)
    for number in range(2, 30):
        policy(asking(body % (number, words(number, 40_000).encode())), workers)
        assert policy(asking(body % (number, prompt)), workers) is first


def test_the_tokens_of_a_plugin_are_a_prompt_as_well() -> None:
    """As ``radix_cache`` sends them: an array, which is encoded for the choice and not again for the worker."""
    workers = ready(0, 0, 0, 0)
    policy = CacheAware(Settings())

    def tokens(count: int) -> Exchange:
        exchange = asking(b'{"text": "not sent"}')
        ids = np.arange(1, 1 + count, dtype=np.int32)
        exchange.request.replace_json({"sampling_params": {}, "input_ids": ids})
        return exchange

    first = policy(tokens(500), workers)
    assert [policy(tokens(500 + 100 * turn), workers) for turn in range(5)] == [first] * 5
    asked = tokens(500)
    policy(asked, workers)
    assert asked.request.body is asked.request.body


def test_a_short_prompt_goes_to_the_idle_worker_that_has_it() -> None:
    workers = ready(0, 0, 0, 0)
    policy = CacheAware(Settings())
    first = policy(generate("2 + 2 ="), workers)
    policy(generate("one, two,"), workers)
    assert [policy(generate("2 + 2 ="), workers) for _ in range(5)] == [first] * 5
    first.in_flight = 1
    assert policy(generate("2 + 2 ="), workers) is not first


def test_a_worker_that_comes_and_goes_is_like_a_new_one_each_time() -> None:
    steady, flapping = workers = ready(0, 0)
    policy = CacheAware(Settings())
    text = words(1)
    for _ in range(5000):  # more often than there are bits
        policy(generate(text), [flapping])
        policy.forget(flapping)
    policy(generate(text), [steady])
    assert [policy(generate(text), workers) for _ in range(5)] == [steady] * 5


def test_a_worker_of_which_nothing_is_known_any_more_is_as_good_as_new() -> None:
    one, two = ready(0, 0)
    policy = CacheAware(Settings())
    policy(generate(words(1)), [one])
    policy(generate(words(2, 3000)), [two])
    policy.forget(one)
    policy(generate(words(3)), [one])
    policy.forget(one)
    policy.forget(one)  # a worker that nothing is known of, too
    assert policy(generate(words(2, 3000)), [one, two]) is two
    policy.forget_all()
    chosen = {policy(generate(words(2, 3000)), [worker]) for worker in (one, two)}
    assert chosen == {one, two}


# through a router


@asynccontextmanager
async def routed(start: Start) -> AsyncIterator[tuple[Running, list[str]]]:
    async with (
        serving(answering(b"0")) as zero,
        serving(answering(b"1")) as one,
        start("--policy", "cache_aware", "--disable-health-check") as running,
    ):
        for url in (zero, one):
            await running.client.post("/add_worker", json={"url": url})
        yield running, [zero, one]


async def ask(running: Running, prompt: str) -> int:
    return int((await running.client.post("/generate", json={"text": prompt})).content)


@pytest.mark.anyio
async def test_requests_follow_their_prompts_until_the_weights_are_new(start: Start) -> None:
    async with routed(start) as (running, _):
        first = await ask(running, words(1))
        assert [await ask(running, words(1) + words(turn, 100)) for turn in range(5)] == [first] * 5
        await running.client.post("/weight_version", json={"weight_version": "2"})
        # Nothing is known: a large prompt goes anywhere, and the old one to where that is not.
        large = await ask(running, words(2, 40_000))
        assert await ask(running, words(1)) == 1 - large


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/flush_cache", "/release_memory_occupation"])
async def test_engines_that_drop_their_caches_are_equal_again(start: Start, path: str) -> None:
    async with routed(start) as (running, _):
        assert [await ask(running, words(seed)) for seed in (1, 2, 2)] == [0, 1, 1]
        assert (await running.client.post(path, json={})).status_code == 200
        assert await ask(running, words(2)) == 0  # of equal workers, the first


@pytest.mark.anyio
async def test_a_worker_that_registers_again_has_an_empty_cache(start: Start) -> None:
    async with routed(start) as (running, urls):
        first = await ask(running, words(1))
        await ask(running, words(2, 3000))  # the other one
        await running.client.post(f"/remove_worker?url={urls[first]}")
        await running.client.post(f"/add_worker?url={urls[first]}")
        assert await ask(running, words(3)) == first  # it knows least
