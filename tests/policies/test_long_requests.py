"""Requests for far longer answers than others: no worker gets a second one while others have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.asking import Clock, asking, ready, words
from router_core import Exchange, Worker
from slime_policies import Auto, CacheAware, LeastInflight, Policy, Settings
from slime_policies.prompt_key import find_prompt
from slime_policies.request_tokens import limit_beside_prompt
from slime_policies.tokens_in_flight import TokensInFlight

_POLICIES: dict[str, Callable[[Clock], Policy]] = {
    "cache_aware": lambda clock: CacheAware(Settings(), clock),
    "auto": lambda clock: Auto(Settings(), clock),
    "least_inflight": lambda clock: LeastInflight(),
    "least_inflight, tokens": lambda clock: LeastInflight(TokensInFlight(clock)),
}
_PROMPT = words(0, 1200)  # 300 tokens: lacking them costs 900, and one request in flight 240


def limited(limit: int, prompt: str = _PROMPT) -> Exchange:
    return asking(b'{"text": "%s", "sampling_params": {"max_new_tokens": %d}}' % (prompt.encode(), limit))


def send(policy: Policy, exchange: Exchange, workers: list[Worker]) -> Worker:
    """Choose a worker, which has the request in flight until the exchange is closed."""
    worker = policy(exchange, workers)
    worker.in_flight += 1

    def end() -> None:
        worker.in_flight -= 1

    exchange.on_close(end)
    return worker


def warm(policy: Policy, clock: Clock, workers: list[Worker], limit: int = 200) -> None:
    """Let ``policy`` see 40 requests for ``limit`` tokens, which end."""
    for number in range(40):
        exchange = limited(limit, words(number + 1, 40))
        send(policy, exchange, workers)
        exchange.close()
    clock.now += 10


@pytest.mark.parametrize("name", _POLICIES)
def test_straggler_does_not_get_a_second_one_while_others_idle(name: str) -> None:
    workers, clock = ready(0, 0, 0, 0), Clock()
    policy = _POLICIES[name](clock)
    warm(policy, clock, workers)
    chosen = []
    for _ in workers:
        chosen.append(send(policy, limited(4000), workers))
        clock.now += 1  # its prompt has been computed
    assert {*chosen} == {*workers}


def test_group_of_samples_stays_together_when_all_have_the_same_limit() -> None:
    workers, clock = ready(0, 0, 0, 0), Clock()
    policy = CacheAware(Settings(), clock)
    warm(policy, clock, workers, limit=4000)
    chosen = set()
    for _ in range(3):
        chosen.add(send(policy, limited(4000), workers))
        clock.now += 1
    assert len(chosen) == 1


def test_short_requests_avoid_the_worker_of_a_straggler() -> None:
    workers = one, two = ready(0, 0)
    clock = Clock()
    policy = CacheAware(Settings(), clock)
    warm(policy, clock, workers)
    straggler = limited(4000)
    busy = send(policy, straggler, workers)
    calm = two if busy is one else one
    clock.now += 1
    calm.in_flight = 1  # as many as the other one
    assert policy(limited(200, words(77, 40)), workers) is calm
    calm.in_flight = 2  # a straggler counts less than a further request
    clock.now += 1
    assert policy(limited(200, words(78, 40)), workers) is busy


def test_straggler_counts_where_it_was_sent_last() -> None:
    workers = one, two = ready(0, 0)
    clock = Clock()
    policy = CacheAware(Settings(), clock)
    warm(policy, clock, workers)
    straggler = limited(4000)
    policy(straggler, [one])
    policy(straggler, [two])  # the first one failed
    clock.now += 1
    assert policy.state(one).more == 0 < policy.state(two).more
    straggler.close()
    assert policy.state(two).more == 0


def test_long_answer_is_no_load_of_a_prefill_worker() -> None:
    workers = [Worker(f"http://127.0.0.1:{port}", "prefill") for port in (1, 2)]
    clock = Clock()
    policy = CacheAware(Settings(), clock)
    warm(policy, clock, workers)
    chosen = policy(limited(4000), workers)
    assert policy.state(chosen).more == 0


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"text": "a", "sampling_params": {"max_new_tokens": 7}}', 7),
        (b'{"max_tokens" : 8, "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 5000), 8),
        (b'{"prompt": "a", "max_completion_tokens": 9, "n": 2}', 9),
        (b'{"text": "a", "sampling_params": {"max_new_tokens": null}}', None),
        (rb'{"text": "\"max_new_tokens\": 5"}', None),
        (b'{"text": "a"}', None),
        (b"", None),
    ],
)
def test_limit_is_read_before_and_behind_the_prompt(body: bytes, limit: int | None) -> None:
    assert limit_beside_prompt(body, find_prompt(body)[0]) == limit


@pytest.mark.parametrize("limit", [0, 999_999_999])
def test_absurd_limits_are_survived(limit: int) -> None:
    workers, clock = ready(0, 0), Clock()
    policy = CacheAware(Settings(), clock)
    warm(policy, clock, workers)
    assert policy.state(send(policy, limited(limit), workers)).more <= 7
