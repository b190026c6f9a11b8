"""``consistent_hashing`` and ``prefix_hash``: keys and prompts belong to workers on a ring."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack

import orjson
import pytest

import holding
from pd.stand_ins import StandIn, between
from policies.asking import asking, ready
from router_core import Exchange, Worker
from router_core.pool import WorkerPool
from router_core.types import Receive, Scope, Send
from routers import Start, answering
from slime_http.serving import serving
from slime_policies import ConsistentHashing, PrefixHash, Settings
from slime_policies.prompt_start import PromptStart
from slime_policies.ring import WorkerRing
from slime_sglang.ranks import split

KEYS = [f"key {number}" for number in range(2000)]

_ELSEWHERE = """
from router_core import Worker
from slime_policies.ring import WorkerRing
ring = WorkerRing()
workers = [Worker(f"http://127.0.0.1:{port}") for port in range(4, 0, -1)]
print(*(ring.owner(b"key %d" % number, workers).url for number in range(50)))
"""


def owners(policy: ConsistentHashing, workers: list[Worker]) -> dict[str, str]:
    return {key: policy(asking(session=key), workers).url for key in KEYS}


# the ring


def test_each_worker_has_about_its_share() -> None:
    shares = Counter(owners(ConsistentHashing(), ready(*[0] * 8)).values())
    assert len(shares) == 8
    assert max(shares.values()) < 1.5 * len(KEYS) / 8
    assert min(shares.values()) > 0.5 * len(KEYS) / 8


def test_a_worker_that_comes_or_goes_moves_only_its_share() -> None:
    policy, workers = ConsistentHashing(), ready(*[0] * 5)
    before = owners(policy, workers[:4])
    more = owners(policy, workers)
    assert {more[key] for key in KEYS if more[key] != before[key]} == {workers[4].url}
    left = owners(policy, workers[1:4])
    assert {before[key] for key in KEYS if left[key] != before[key]} == {workers[0].url}
    policy.forget(workers[0])  # it was registered again, perhaps
    assert owners(policy, workers[:4]) == before


def test_the_order_of_workers_and_what_was_there_before_do_not_matter() -> None:
    workers = ready(*[0] * 5)
    policy = ConsistentHashing()
    owners(policy, workers)
    policy.forget(workers[4])
    assert owners(policy, workers[3::-1]) == owners(ConsistentHashing(), workers[:4])


def test_another_process_finds_the_same_owners() -> None:
    """Python's own hashes of strings differ from process to process."""
    told = subprocess.run([sys.executable, "-c", _ELSEWHERE], check=True, capture_output=True, text=True)
    ring, workers = WorkerRing(), ready(0, 0, 0, 0)
    assert told.stdout.split() == [ring.owner(b"key %d" % number, workers).url for number in range(50)]


def test_unoffered_worker_lends_its_keys_to_the_next_one() -> None:
    policy, workers = ConsistentHashing(), ready(0, 0, 0)
    offered = tuple(workers)
    key = asking(session="key")
    first = policy(key, offered)
    second = policy(key, [worker for worker in workers if worker is not first])
    assert policy(key, tuple(worker for worker in workers if worker is not first)) is second
    (third,) = {*workers} - {first, second}
    assert policy(key, [third]) is third
    assert policy(key, offered) is first


def test_ranks_have_own_places_and_leave_the_ring_with_their_server() -> None:
    policy, (server, other) = ConsistentHashing(), ready(0, 0)
    split(WorkerPool(lambda worker, change: None), server, 4)
    ranks = [*server.targets, other]
    assert {policy(asking(session=key), ranks).name for key in KEYS} == {rank.name for rank in ranks}
    policy.forget(server)
    assert {policy(asking(session=key), [other]) for key in KEYS[:50]} == {other}
    assert {policy(asking(session=key), ranks).name for key in KEYS} == {rank.name for rank in ranks}


def test_requests_without_a_key_go_to_the_fewest_in_flight() -> None:
    busy, calm = ready(2, 1)
    assert {ConsistentHashing()(asking(), [busy, calm]) for _ in range(20)} == {calm}


def test_a_key_may_be_any_text() -> None:
    workers = ready(0, 0)
    assert ConsistentHashing()(asking(session="\ud800é"), workers) in workers


# through a router


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """A worker that is well, and answers nothing but what it is."""
    status = 200 if scope.get("path") == "/model_info" else 503
    await answering(b"{}", status)(scope, receive, send)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["consistent_hashing", "consistent_hash"])
async def test_the_ring_decides_for_each_request_of_a_session(start: Start, name: str) -> None:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(answering(b"%d" % number))) for number in range(3)]
        running = await stack.enter_async_context(start("--policy", name, "--disable-health-check"))
        client = running.client

        async def places() -> dict[str, str]:
            headers = [{"X-SMG-Routing-Key": key} for key in KEYS[:20]]
            headers += [{"X-Session-Id": key, "X-SMG-Routing-Key": "another"} for key in KEYS[20:40]]
            return {
                key: (await client.get("/", headers=header)).text
                for key, header in zip(KEYS, headers, strict=False)
            }

        for url in urls[:2]:
            await client.post("/add_worker", json={"url": url})
        two = await places()
        assert await places() == two
        await client.post("/add_worker", json={"url": urls[2]})
        three = await places()
        assert {three[key] for key in two if three[key] != two[key]} == {"2"}
        pool = running.router.pool
        holding.quarantine(pool, pool.find(urls[2]), "a test")
        assert await places() == two
        holding.ready(pool, pool.find(urls[2]))
        assert await places() == three


@pytest.mark.anyio
async def test_a_retry_goes_to_the_next_worker_on_the_ring(start: Start) -> None:
    flags = ("--policy", "consistent_hashing", "--disable-health-check", "--retry-initial-backoff-ms", "1")
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(answering(b"%d" % number))) for number in range(2)]
        urls.append(await stack.enter_async_context(serving(refusing)))
        running = await stack.enter_async_context(start(*flags, "--disable-circuit-breaker"))
        for url in urls:
            await running.client.post("/add_worker", json={"url": url})
        ring, workers = WorkerRing(), [Worker(url) for url in urls]
        failing = [key for key in KEYS if ring.owner(key.encode(), workers).url == urls[2]][:10]
        for key in failing:
            answer = await running.client.get("/", headers={"X-SMG-Routing-Key": key})
            assert answer.text == str(workers.index(ring.owner(key.encode(), workers[:2])))


@pytest.mark.anyio
async def test_each_half_of_a_pair_has_a_ring(start: Start) -> None:
    halves = [StandIn("prefill"), StandIn("prefill"), StandIn("decode"), StandIn("decode")]
    async with between(start, *halves, flags=("--policy", "consistent_hashing")) as running:
        for number in range(24):
            body = {"text": "a", "session_id": KEYS[number % 8]}
            assert (await running.client.post("/generate", json=body)).status_code == 200
        assert not running.router.pool.keeps_sessions
    for half in halves:
        counts = Counter(body["session_id"] for body in half.bodies)
        assert set(counts.values()) <= {3}


# prompts


def generate(prompt: str) -> Exchange:
    return asking(orjson.dumps({"sampling_params": {}, "text": prompt}))


def words(seed: int, size: int) -> str:
    return "".join(random.Random(seed).choices("abcdef ", k=size))


def test_prompts_that_begin_alike_go_to_one_worker_of_any_router() -> None:
    workers = ready(*[0] * 4)
    one, two = PrefixHash(Settings()), PrefixHash(Settings())
    chosen = set()
    for seed in range(40):
        beginning = words(seed, 1024)
        first = one(generate(beginning), workers)
        assert {two(generate(beginning + words(other, 100)), workers) for other in range(5)} == {first}
        chosen.add(first)
    assert len(chosen) == 4


def test_the_number_of_tokens_that_decide_is_the_setting() -> None:
    workers = ready(*[0] * 8)
    few, many = PrefixHash(Settings(prefix_token_count=2)), PrefixHash(Settings(prefix_token_count=4))
    prompts = [asking(orjson.dumps({"input_ids": [1, 2, 3, number]})) for number in range(40)]
    assert len({few(prompt, workers) for prompt in prompts}) == 1
    assert len({many(prompt, workers) for prompt in prompts}) > 1


@pytest.mark.parametrize(("load", "kept"), [(5, True), (6, False)])
def test_a_worker_with_too_much_to_do_is_passed_over(load: int, kept: bool) -> None:
    """Of 4 workers: 5 is not above 1.25 times (15 + 1) / 4, and 6 is above 1.25 times (16 + 1) / 4."""
    workers, policy = ready(0, 0, 0, 0), PrefixHash(Settings())
    prompt = generate("Why?")
    owner = policy(prompt, workers)
    calm, *others = [worker for worker in workers if worker is not owner]
    owner.in_flight, calm.in_flight = load, 2
    for other in others:
        other.in_flight = 4
    assert policy(prompt, workers) is (owner if kept else calm)


def test_the_load_factor_is_the_setting() -> None:
    workers = ready(0, 0)
    prompt = generate("Why?")
    owner = PrefixHash(Settings())(prompt, workers)
    owner.in_flight = 3  # of a mean of 2
    assert PrefixHash(Settings(prefix_hash_load_factor=1.5))(prompt, workers) is owner
    assert PrefixHash(Settings(prefix_hash_load_factor=1.4))(prompt, workers) is not owner


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"text": ""}', b'{"text": null, "input_ids": []}', b'{"text": {}}']
)
def test_a_request_without_a_prompt_goes_to_the_fewest_in_flight(body: bytes) -> None:
    busy, calm = ready(2, 1)
    assert {PrefixHash(Settings())(asking(body), [busy, calm]) for _ in range(20)} == {calm}


# where a prompt begins

START = PromptStart(3)  # ids, or 12 bytes


@pytest.mark.parametrize(
    ("body", "start"),
    [
        (b'{"text": "abc", "rid": "1"}', b"abc"),
        (b'{"rid": "1", "text":"abcdefghijklmnop"}', b"abcdefghijkl"),
        (b'{"text": "a\\"b\\\\", "x": "y"}', b'a\\"b\\\\'),
        (b'{"text": "0123456789a\\n"}', b"0123456789a"),
        (b'{"text": ["abc", "def"]}', b"abc"),
        (b'{"input_ids": [1, 22 , 3, 4]}', b"1,22,3"),
        (b'{"input_ids":[1,22,3]}', b"1,22,3"),
        (b'{"input_ids": [\n 7\n]}', b"7"),
        (b'{"input_ids": [[1, 2], [3]]}', b"1,2"),
        (b'{"text": null, "input_ids": [5, 6]}', b"5,6"),
        (b'{"prompt": "abc"}', b"abc"),
        (b'{"prompt": [9, 8]}', b"9,8"),
        (b'{"messages": [], "prompt": "abc"}', b"abc"),
        (b'{"messages": [{"role": "user"}]}', b'[{"role": "u'),
        (b'{"messages": [{"":0}], "rid": "1"}', b'[{"":0}]'),
        (b'{"messages": [{"]":"}"}], "rid": "1"}', b'[{"]":"}"}]'),
        (b'{"tools": {"text": {"type": "x"}}, "messages": [{}]}', b"[{}]"),
        (b'{"rid": "1"}', b""),
    ],
)
def test_a_prompt_begins(body: bytes, start: bytes) -> None:
    assert START.of(body) == start


def test_of_a_prompt_that_is_long_only_the_beginning_is_read() -> None:
    ids = orjson.dumps({"input_ids": list(range(1_000_000))})
    assert PromptStart(256).of(ids) == b",".join(b"%d" % number for number in range(256))
    assert len(PromptStart(256).of(b'{"text": "' + b"x" * 10_000_000)) == 1024
