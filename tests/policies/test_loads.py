"""``--load tokens`` and ``--load engine``: what a worker's load is, and that nothing of it is left at the end."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import orjson
import pytest

from deadlines import until
from engine.served import CHAT, served
from pd.stand_ins import DROP, HANG, StandIn, between, said, stream
from policies.asking import Clock, asking, load_in, ready
from router_core import Worker
from router_core.cli import build, main
from routers import Start, answering
from slime_engine.model import NgramModel, load_model
from slime_engine.settings import Settings as EngineSettings
from slime_http.serving import serving
from slime_policies import LeastInflight, Policy, PowerOfTwo, Settings
from slime_policies.contract import check_policy
from slime_policies.counting import Counting
from slime_policies.engine_loads import EngineLoads
from slime_policies.plugin import POLICIES
from slime_policies.request_tokens import MeanLength, completions_of, limit_of, prompt_tokens_of
from slime_policies.tokens_in_flight import PROMPT_WEIGHT, TokensInFlight
from slime_sglang.ranks import split
from slime_testing import Call, FakeEngine, Running

LEAST = ("--policy", "least_inflight")
FAST = ("--load-poll-interval-secs", "0.05")


@pytest.fixture(scope="module")
def model() -> NgramModel:
    return load_model()


def body_for(prompt_tokens: int, max_new_tokens: int | None = None) -> bytes:
    limit = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    return orjson.dumps({"sampling_params": limit, "text": "abc " * prompt_tokens})


def tokens_in(running: Running) -> list[tuple[int, int]]:
    """The tokens in flight at each worker."""
    return [load_in(running, worker).tokens_of(worker) for worker in running.router.pool]


async def add(running: Running, *urls: str) -> list[Worker]:
    for url in urls:
        assert (await running.client.post("/add_worker", json={"url": url})).status_code == 200
    return [running.router.pool.find(url) for url in urls]


# the contract, and the flags


@pytest.mark.parametrize("load", ["tokens", "engine"])
@pytest.mark.parametrize("name", ["least_inflight", "power_of_two"])
def test_policy_keeps_the_contract_with_each_load(name: str, load: str) -> None:
    check_policy(lambda: POLICIES[name](Settings(load=load)))


@pytest.mark.parametrize("name", ["least_inflight", "power_of_two"])
@pytest.mark.anyio
async def test_requests_in_flight_need_no_sender(start: Start, name: str) -> None:
    def layers(running: Running) -> set[type]:
        sender: Any = running.router.sender
        found = set()
        while sender is not running.router.proxy:
            found.add(type(sender))
            sender = sender._inner
        return found

    async with start("--policy", name) as running:
        assert Counting not in layers(running)
    async with start("--policy", name, "--load", "tokens") as running:
        assert Counting in layers(running)


def test_a_flag_without_effect_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(["--policy", "round_robin", "--load", "tokens"])
        build(["--policy", "least_inflight", "--load", "tokens", "--load-poll-interval-secs", "2"])
    assert caplog.messages == [
        "--load has no effect: it is for policy least_inflight or power_of_two",
        "--load-poll-interval-secs has no effect: it is for --load engine",
    ]


def test_an_interval_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", "engine", "--load-poll-interval-secs", "0"]) == 2
    assert "--load-poll-interval-secs: wanted a number above 0" in capsys.readouterr().err


# estimates


@pytest.mark.parametrize(
    ("body", "prompt", "limit", "completions"),
    [
        (b'{"text": "%s"}' % (b"x" * 400), 100, None, 1),
        (b'{"input_ids": [%s]}' % b",".join([b"12345"] * 50), 50, None, 1),
        (b'{"sampling_params": {"max_new_tokens": 70, "n": 4}, "text": ""}', 1, 70, 4),
        (b'{"max_completion_tokens" : 9, "messages": []}', 1, 9, 1),
        (b'{"max_tokens":8,"n":0,"prompt":"a"}', 1, 8, 1),
        (b'{"max_tokens":null,"n":"many","text":"say \\"max_new_tokens\\": 5"}', 7, None, 1),
        (b'{"max_tokens": 12345678901234567890}', 9, None, 1),
        (b'{"n": 99999999, "text": "a"}', 1, None, 1024),
        (b"", 1, None, 1),
    ],
)
def test_tokens_are_estimated_from_bytes(
    body: bytes, prompt: int, limit: int | None, completions: int
) -> None:
    assert abs(prompt_tokens_of(body) - prompt) <= 1
    assert (limit_of(body), completions_of(body)) == (limit, completions)


def test_the_mean_length_follows_the_completions() -> None:
    mean = MeanLength()
    assert mean.tokens == 128
    mean.learn(10)
    assert mean.tokens == 10
    mean.learn(20)
    assert mean.tokens == 15
    for _ in range(3000):
        mean.learn(500)
    assert abs(mean.tokens - 500) < 1


# tokens in flight


def test_prompts_count_until_the_first_byte_and_answers_until_the_end() -> None:
    (regular,), load = ready(0), TokensInFlight()
    prefill, decode = Worker("http://p:1", "prefill"), Worker("http://d:1", "decode")
    body = body_for(100, 50)
    prompt = prompt_tokens_of(body)
    for worker, waiting, begun in (
        (regular, PROMPT_WEIGHT * prompt + 50, 50),
        (prefill, prompt, 0),
        (decode, 50, 50),
    ):
        exchange = asking(body)
        assert load.least(exchange, [worker]) is worker
        assert load.loads([worker]) == [waiting]
        load.begin(exchange)
        assert load.loads([worker]) == [begun]
        load.begin(exchange)
        exchange.close()
        exchange.close()
        assert load.loads([worker]) == [0]
        assert load.tokens_of(worker) == (0, 0)


def test_a_request_that_moves_counts_at_one_worker() -> None:
    (one, two), load, exchange = ready(0, 0), TokensInFlight(), asking(body_for(10, 50))
    load.count(exchange, one)
    load.count(exchange, one)
    load.begin(exchange)
    load.count(exchange, two)
    assert load.tokens_of(one) == (0, 0)
    prompt, answer = load.tokens_of(two)
    assert (prompt > 0, answer) == (True, 50)
    exchange.close()
    assert load.tokens_of(two) == (0, 0)


@pytest.mark.parametrize("make", [LeastInflight, PowerOfTwo])
def test_one_long_request_weighs_more_than_two_short_ones(make: Callable[[TokensInFlight], Policy]) -> None:
    load = TokensInFlight()
    long, short = ready(1, 2)
    load.count(asking(body_for(1, 1000)), long)
    for _ in range(2):
        load.count(asking(body_for(1, 10)), short)
    assert make(load)(asking(body_for(1, 10)), [long, short]) is short


def test_a_request_that_does_not_generate_counts_nothing() -> None:
    (worker,), load, exchange = ready(0), TokensInFlight(), asking(body_for(10))
    exchange.request.method = "GET"
    load.count(exchange, worker)
    load.begin(exchange)
    assert load.tokens_of(worker) == (0, 0)
    assert not load.is_single(exchange)


def test_equal_loads_are_decided_by_requests_in_flight() -> None:
    busy, calm = ready(3, 1)
    assert {TokensInFlight().least(asking(), [busy, calm]) for _ in range(20)} == {calm}


# loads of engines


def test_requests_sent_since_the_poll_are_added() -> None:
    clock, (one, two) = Clock(), ready(0, 0)
    load = EngineLoads(1.0, clock)
    for worker, tokens in ((one, 1000), (two, 300)):
        load.set_polled(worker, tokens, clock.now)
    body = body_for(100, 400)
    size = prompt_tokens_of(body) + 400
    first, second = asking(body), asking(body)
    assert load.least(first, [one, two]) is two
    load.begin(first)
    assert load.loads([one, two]) == [1000, 300 + size]
    assert load.least(second, [one, two]) is two
    clock.now += 0.5
    load.set_polled(two, 900, clock.now)  # the engine has told of both
    assert load.loads([one, two]) == [1000, 900]
    first.close()
    third = asking(body)
    load.count(third, two)
    assert load.loads([two]) == [900 + size]
    third.close()
    second.close()
    assert load.loads([two]) == [900]


def test_an_unknown_load_is_that_of_its_requests_and_never_idle() -> None:
    clock = Clock()
    load = EngineLoads(1.0, clock)
    one, two, unknown = workers = ready(2, 4, 3)
    for worker, tokens in ((one, 200), (two, 1000)):
        load.set_polled(worker, tokens, clock.now)
    assert load.loads(workers) == [200, 1000, 3 * 1200 / 6]
    unknown.in_flight = 0
    assert load.loads(workers) == [200, 1000, 200]
    one.in_flight = two.in_flight = 0
    for worker in (one, two):
        load.set_polled(worker, 0, clock.now)
    assert load.loads(workers) == [0, 0, 1]
    load.set_polled(one, None, clock.now)  # failed
    assert load.loads(workers) == [1, 0, 1]


def test_a_poll_that_is_forgotten_leaves_no_tokens_behind() -> None:
    clock, (worker,), exchange = Clock(), ready(0), asking(body_for(10, 50))
    load = EngineLoads(1.0, clock)
    load.count(exchange, worker)
    clock.now += 1
    load.set_polled(worker, 60, clock.now)  # the request is part of it
    load.set_polled(worker, None, clock.now)
    exchange.close()
    load.set_polled(worker, 0, clock.now)
    assert load.loads([worker]) == [0]


def test_an_old_load_is_unknown_and_without_any_requests_count() -> None:
    clock = Clock()
    load = EngineLoads(1.0, clock)
    one, two = workers = ready(5, 1)
    load.set_polled(one, 0, clock.now)
    load.set_polled(two, 9000, clock.now)
    assert load.loads(workers) == [5, 9000]
    clock.now += 3.1
    load.set_polled(two, 9000, clock.now)
    assert load.loads(workers) == [5 * 9000, 9000]
    clock.now += 3.1
    assert load.loads(workers) == [5, 1]


class Reporting(FakeEngine):
    """An engine whose ``path`` tells ``load``: a status, or JSON; None: JSON, too late."""

    def __init__(self, load: Any, path: str = "/get_load") -> None:
        super().__init__()
        self.load = load
        self.path = path
        self.rest = lambda _: {"text": "x", "meta_info": {"completion_tokens": 3}}
        self.other = self._report

    @property
    def polls(self) -> int:
        return sum(call.path == self.path for call in self.calls)

    async def _report(self, call: Call) -> tuple[int, bytes]:
        if call.path != self.path:
            return (200 if call.path == "/health" else 404), b""
        if self.load is None:
            await anyio.sleep(0.3)
        return (self.load, b"") if isinstance(self.load, int) else (200, orjson.dumps(self.load))


@asynccontextmanager
async def reporting(start: Start, *workers: Reporting, flags: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker.app)) for worker in workers]
        running = await stack.enter_async_context(start(*LEAST, "--load", "engine", *FAST, *flags))
        await add(running, *urls)
        yield running


@pytest.mark.parametrize("load", [500, None, {"loads": 3}, [{"num_tokens": -5}], [{"num_tokens": True}]])
@pytest.mark.anyio
async def test_a_worker_with_a_bad_load_is_unknown_and_still_used(start: Start, load: Any) -> None:
    good, bad = Reporting([{"num_tokens": 4}]), Reporting(load)
    async with reporting(start, good, bad) as running:
        known, unknown = running.router.pool
        loads = load_in(running, known)
        await until(lambda: good.polls > 3 and bad.polls > 2)
        await until(lambda: loads.loads([known, unknown]) == [4, 4])
        unknown.in_flight += 3
        await until(lambda: loads.loads([known, unknown]) == [4, 12])
        unknown.in_flight -= 3
        for _ in range(12):
            assert (await running.client.post("/generate", content=body_for(10, 10))).status_code == 200
        await until(lambda: loads.tokens_of(known) == loads.tokens_of(unknown) == (0, 0))
    assert len(good.asked) + len(bad.asked) == 12


@pytest.mark.anyio
async def test_a_worker_that_recovers_is_known_again(start: Start) -> None:
    worker = Reporting(500, "/v1/loads")
    async with reporting(start, worker) as running:
        (known,) = running.router.pool
        loads = load_in(running, known)
        known.in_flight += 1
        await until(lambda: worker.polls > 1)
        assert loads.loads([known]) == [1]
        worker.load = {"loads": [{"dp_rank": 0, "num_used_tokens": 70}, {"dp_rank": 1, "num_used_tokens": 7}]}
        await until(lambda: loads.loads([known]) == [77])
        split(running.router.pool, known, 3)
        ranks = known.choices
        await until(lambda: loads.loads(ranks)[:2] == [70, 7])
        assert loads.loads(ranks) == [70, 7, 77]  # of the third it says nothing, and none has a request
        running.router.pool.remove(known)
        await until(lambda: loads.loads(ranks) == [0, 0, 0])
        known.in_flight -= 1


@pytest.mark.parametrize("load", ["requests", "tokens"])
@pytest.mark.anyio
async def test_only_a_policy_with_loads_of_engines_polls(start: Start, load: str) -> None:
    worker = Reporting([{"num_tokens": 4}])
    async with serving(worker.app) as url, start(*LEAST, "--load", load) as running:
        await add(running, url)
        await anyio.sleep(0.2)
    assert not worker.polls


@pytest.mark.anyio
async def test_work_of_others_at_an_engine_sends_requests_elsewhere(start: Start, model: NgramModel) -> None:
    slow = EngineSettings(tokens_per_second=20)
    async with (
        served(lambda: model, slow) as busy,
        served(lambda: model, slow) as calm,
        start(*LEAST, "--load", "engine", *FAST, "--disable-health-check") as running,
    ):
        workers = await add(running, str(busy.client.base_url), str(calm.client.base_url))
        loads = load_in(running, workers[0])
        async with anyio.create_task_group() as tasks:
            sampling = {"max_new_tokens": 2000, "ignore_eos": True}
            tasks.start_soon(
                lambda: busy.client.post("/generate", json={"text": CHAT, "sampling_params": sampling})
            )
            await until(lambda: loads.loads(workers)[0] > 5 and loads.loads(workers)[1] == 0)
            for _ in range(4):
                body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
                assert (await running.client.post("/generate", json=body)).status_code == 200
            tasks.cancel_scope.cancel()
        entries = [len(list(each.host.engine.journal.entries(None))) for each in (busy, calm)]
    assert entries[1] == 4


# nothing is left


async def _converse(running: Running, rng: random.Random, number: int) -> None:
    """Two or three turns of each kind; some are given up, some have their end in an abort, some fail."""
    for turn in range(rng.randint(2, 3)):
        streams, rid = rng.random() < 0.5, f"{number}-{turn}"
        sampling = {"ignore_eos": True, "n": rng.choice([1, 1, 1, 2])}
        if rng.random() < 0.7:
            sampling["max_new_tokens"] = rng.choice([1, 8, 30])
        body: dict[str, Any] = {"rid": rid, "text": CHAT * rng.randint(1, 5), "stream": streams}
        body["sampling_params"] = sampling
        if rng.random() < 0.1:
            body["text"] = None  # the engine refuses it
        if sampling["n"] > 1:
            del body["rid"]
        headers = {"x-session-id": f"s{number}"} if number % 2 else {}
        fate = rng.random()
        with anyio.move_on_after(rng.uniform(0.01, 0.1) if fate < 0.3 else 30):
            async with anyio.create_task_group() as tasks:
                if 0.3 < fate < 0.5:
                    tasks.start_soon(_abort_later, running.client, rid)
                answer = await running.client.post("/generate", json=body, headers=headers)
                assert answer.status_code in (200, 400, 422, 502, 503), answer.text


async def _abort_later(client: httpx.AsyncClient, rid: str) -> None:
    await anyio.sleep(0.02)
    await client.post("/abort_request", json={"rid": rid})


@pytest.mark.parametrize(("policy", "load"), [("least_inflight", "tokens"), ("power_of_two", "engine")])
@pytest.mark.anyio
async def test_no_load_is_left_after_random_conversations(
    start: Start, model: NgramModel, policy: str, load: str
) -> None:
    rng = random.Random(f"{policy} {load}")
    flags = ("--policy", policy, "--load", load, "--disable-health-check", "--retry-initial-backoff-ms", "1")
    async with AsyncExitStack() as stack:
        settings = EngineSettings(tokens_per_second=400)
        engines = [await stack.enter_async_context(served(lambda: model, settings)) for _ in range(2)]
        urls = [str(engine.client.base_url) for engine in engines]
        urls.append(await stack.enter_async_context(serving(answering(b"", 503))))
        running = await stack.enter_async_context(start(*flags, *(FAST if load == "engine" else ())))
        workers = await add(running, *urls)
        loads = load_in(running, workers[0])
        seen = 0
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(_converse, running, rng, number)
            for _ in range(20):
                await anyio.sleep(0.01)
                counted = [tokens for worker in workers for tokens in loads.tokens_of(worker)]
                assert min(counted) >= 0
                seen = max(seen, *counted)
        assert seen > 0
        await until(lambda: not any(worker.load for worker in workers))
        await until(lambda: tokens_in(running) == [(0, 0)] * 3)
        assert not loads._requests
        if isinstance(loads, EngineLoads):
            assert not loads._since
            assert not loads._sent


@pytest.mark.anyio
async def test_the_mean_length_is_learned_from_streams_and_whole_answers(
    start: Start, model: NgramModel
) -> None:
    async with (
        served(lambda: model, EngineSettings(tokens_per_second=200)) as engine,
        start(*LEAST, "--load", "tokens", "--disable-health-check") as running,
    ):
        (worker,) = await add(running, str(engine.client.base_url))
        loads = load_in(running, worker)
        body: dict[str, Any] = {"text": CHAT, "sampling_params": {"max_new_tokens": 7, "ignore_eos": True}}
        await running.client.post("/generate", json=body)
        assert loads.mean_length.tokens == 7
        body["sampling_params"]["max_new_tokens"] = 21
        prompts = []
        async with running.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                prompts.append(loads.tokens_of(worker))
        assert (0, 21) in prompts  # after the first byte
        assert loads.mean_length.tokens == 14
        body["sampling_params"] |= {"n": 2, "max_new_tokens": 1}
        await running.client.post("/generate", json=body)
        assert loads.mean_length.tokens == 14


@pytest.mark.anyio
async def test_a_retry_moves_the_tokens(start: Start) -> None:
    bad, good, hold = FakeEngine(), FakeEngine(), anyio.Event()
    bad.script = [(503, b"")]
    good.script = [{"text": "x", "meta_info": {}}]
    good.delay = hold
    flags = (*LEAST, "--load", "tokens", "--disable-health-check", "--retry-initial-backoff-ms", "1")
    async with serving(bad.app) as one, serving(good.app) as two, start(*flags) as running:
        refusing, waiting = await add(running, one, two)
        waiting.in_flight += 1  # so that the other is asked first
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: running.client.post("/generate", content=body_for(10, 50)))
            await until(lambda: bool(good.asked))
            assert tokens_in(running)[0] == (0, 0)
            assert tokens_in(running)[1][1] == 50
            hold.set()
        waiting.in_flight -= 1
        await until(lambda: tokens_in(running) == [(0, 0)] * 2)
        assert not refusing.in_flight


@pytest.mark.anyio
async def test_a_pair_counts_prompts_at_one_and_answers_at_the_other(start: Start) -> None:
    halves = [
        StandIn("prefill", said(), stream({"text": "x", "meta_info": {}}), DROP),
        StandIn("prefill"),
        StandIn("decode", HANG, stream({"text": "x", "meta_info": {}})),
        StandIn("decode", HANG),
    ]
    flags = (*LEAST, "--load", "tokens", "--disable-circuit-breaker")
    async with between(start, *halves, flags=flags) as running:
        prefills = [half.worker for half in halves[:2]]
        decodes = [half.worker for half in halves[2:]]
        at_prefill, at_decode = load_in(running, prefills[0]), load_in(running, decodes[0])
        assert at_prefill is not at_decode
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                body = body_for(100, 60)[:-1] + b',"session_id":"one"}'
                tasks.start_soon(partial(running.client.post, "/generate", content=body))
            await until(lambda: sum(len(half.generations) for half in halves[2:]) == 2)
            await until(lambda: [at_decode.tokens_of(each)[1] for each in decodes] == [60, 60])
            await until(lambda: at_prefill.loads(prefills) == [0, 0])
            tasks.cancel_scope.cancel()
        await until(lambda: tokens_in(running) == [(0, 0)] * 4)
        for session in ("one", "two", "three"):
            for streams in (b"true", b"false"):
                body = body_for(5, 60)[:-1] + b',"stream":%b,"session_id":"%b"}' % (streams, session.encode())
                await running.client.post("/generate", content=body)
        await running.client.post("/tokenize", content=b"{}")
        await until(lambda: tokens_in(running) == [(0, 0)] * 4)
