"""``--prefill-policy bucket``: prompts of like length to the same worker."""

from __future__ import annotations

import logging

import pytest

from policies.asking import Clock
from router_core import Exchange, SettingsError, Worker
from router_core.cli import build
from router_core.request import Request
from slime_policies.bucket import Bucket
from slime_policies.contract import check_policy
from slime_policies.settings import Settings


def exchange(size: int) -> Exchange:
    return Exchange(Request("POST", b"/generate", [], b"x" * size))


def workers(count: int) -> list[Worker]:
    return [Worker(f"http://127.0.0.1:{port}", "prefill") for port in range(1, count + 1)]


def test_bucket_keeps_the_contract_of_policies() -> None:
    check_policy(lambda: Bucket(Settings()))


def ranged(interval_s: float = 5.0) -> Settings:
    """Settings with which loads never count."""
    return Settings(balance_abs_threshold=1 << 40, bucket_adjust_interval_secs=interval_s)


def test_short_and_long_ones_are_kept_apart_by_their_bytes() -> None:
    clock, three = Clock(), workers(3)
    policy = Bucket(ranged(), clock)
    for size in [100] * 90 + [3000] * 3 + [9000]:
        policy(exchange(size), three)
    clock.now = 5.0  # 27,000 bytes, a third of which is 9,000
    assert [policy(exchange(size), three) for size in (10, 99, 200, 2999, 3001, 8999, 50_000)] == [
        three[0],
        three[0],
        three[1],
        three[1],
        three[2],
        three[2],
        three[2],
    ]


def test_ranges_are_divided_anew_only_when_it_is_time_or_workers_come() -> None:
    clock, two = Clock(), workers(2)
    policy = Bucket(ranged(10), clock)
    for size in [100] * 1000 + [1000]:
        policy(exchange(size), two)
    clock.now = 10.0
    assert policy(exchange(500), two) is two[1]
    for _ in range(900):
        policy(exchange(800), two)
    clock.now = 19.0
    assert policy(exchange(500), two) is two[1]
    clock.now = 20.0
    assert policy(exchange(500), two) is two[0]
    three = workers(3)
    assert policy(exchange(100), three) is three[0]  # at once: another number of workers
    assert policy(exchange(900), three) is three[2]


def test_at_first_each_request_tells_much() -> None:
    two = workers(2)
    policy = Bucket(ranged(), Clock())
    for size in (10, 10, 1000, 1000):
        policy(exchange(size), two)
    assert policy(exchange(10), two) is two[0]
    assert policy(exchange(5000), two) is two[1]


def test_bytes_of_the_last_interval_outweigh_the_range() -> None:
    clock, two = Clock(), workers(2)
    policy = Bucket(Settings(balance_abs_threshold=3000, balance_rel_threshold=1.5), clock)
    for size in [100] * 1200 + [1000] * 100:
        policy(exchange(size), two)
    clock.now = 6.0  # none of these counts any more
    assert [policy(exchange(1000), two) for _ in range(4)] == [two[1]] * 4
    assert policy(exchange(1000), two) is two[0]  # 4,000 bytes against none
    assert policy(exchange(1000), two) is two[1]  # 4,000 against 1,000
    clock.now = 11.0
    assert policy(exchange(1000), two) is two[0]  # the same, at the end of the interval
    clock.now = 11.1
    assert policy(exchange(1000), two) is two[1]


def test_thresholds_of_the_bucket_policy_are_both_needed() -> None:
    clock, two = Clock(), workers(2)
    policy = Bucket(Settings(balance_abs_threshold=64, balance_rel_threshold=3), clock)
    for size in [100] * 1200 + [1000] * 100:
        policy(exchange(size), two)
    clock.now = 6.0
    policy(exchange(99), two)  # of the range of the first only
    assert [policy(exchange(160), two) for _ in range(2)] == [two[1]] * 2  # 160 against 99, then 320
    assert policy(exchange(160), two) is two[0]


def test_interval_of_the_bucket_policy_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    line = ["--pd-disaggregation", "--prefill-policy", "bucket", "--bucket-adjust-interval-secs"]
    with pytest.raises(SettingsError, match="--bucket-adjust-interval-secs: wanted a number above 0"):
        build([*line, "0"])
    with caplog.at_level(logging.WARNING):
        build([*line, "3"])
    assert caplog.messages == []
