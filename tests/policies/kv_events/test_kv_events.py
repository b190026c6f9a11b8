"""``--kv-events``: a router, engines and ZeroMQ sockets; what the router believes is what the engines have."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest

from deadlines import HANG_S, until
from policies.kv_events.kv_publishers import Follow, Following, Publishing, engine, events, publishing, stored
from ports import free_port, free_ports
from router_core.cli import build, main
from routers import Start
from slime_engine.model import NgramModel, load_model
from slime_policies import CacheAware, Settings
from slime_policies.kv_events.prompt_ids import PromptIds
from slime_policies.plugin import POLICIES

zmq = pytest.importorskip("zmq")
pytest.importorskip("zmq.asyncio")

CLEARED = {"type": "AllBlocksCleared"}
#: Flags of tests in which a worker is not there for a while.
PATIENT = ("--health-failure-threshold", "100000")


@pytest.fixture(scope="module")
def model() -> NgramModel:
    return load_model()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CacheAware]:
    """The policies of the routers of a test, the latest last."""
    policies: list[CacheAware] = []

    def make(settings: Settings) -> CacheAware:
        policies.append(CacheAware(settings))
        return policies[-1]

    monkeypatch.setitem(POLICIES, "cache_aware", make)
    return policies


@pytest.fixture
def follow(start: Start, made: list[CacheAware]) -> Follow:
    @asynccontextmanager
    async def following(*urls: str, flags: tuple[str, ...] = ()) -> AsyncIterator[Following]:
        async with start("--policy", "cache_aware", "--kv-events", "--worker-urls", *urls, *flags) as running:
            blocks = made[-1].blocks
            assert blocks is not None
            yield Following(running, blocks)

    return following


def conversations(seed: int, count: int) -> list[list[int]]:
    """Prompts that share a beginning."""
    choose = random.Random(seed)
    system = [choose.randrange(5, 1000) for _ in range(200)]
    lengths = [(choose.randrange(200), choose.randrange(1, 400)) for _ in range(count)]
    return [[*system[:shared], *(choose.randrange(5, 1000) for _ in range(own))] for shared, own in lengths]


# embedded engines


@pytest.mark.anyio
async def test_router_knows_what_engines_have_after_load_flush_and_update(
    follow: Follow, model: NgramModel
) -> None:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(engine(model, events(free_port(), free_port()), page_size=size))
            for size in (16, 16, 4)
        ]
        router = await stack.enter_async_context(follow(*(each.url for each in engines)))
        await router.agreed(*engines)
        async with anyio.create_task_group() as tasks:
            for ids in conversations(1, 60):
                tasks.start_soon(router.ask, ids)
        await router.agreed(*engines)
        assert all(each.cache.names() for each in engines)
        for ids in conversations(1, 60):
            prompt = PromptIds.of(orjson.dumps({"input_ids": ids}))
            assert prompt is not None
            in_sync = [router.in_sync(each.url) for each in engines]
            held = router.blocks.tokens_held(prompt, [own for own in in_sync if own is not None])
            assert held == [each.cache.match(ids, len(ids)) for each in engines]

        await router.post("/flush_cache")
        await router.agreed(*engines)
        assert router.blocks.size == 0
        for ids in conversations(2, 10):
            await router.ask(ids)
        await router.post("/update_weights_from_disk", model_path="m", weight_version="2")
        await router.agreed(*engines)
        assert router.blocks.size == 0
        for ids in conversations(2, 10):
            await router.ask(ids)
        await router.agreed(*engines)
        assert router.blocks.size == sum(len(each.cache.names()) for each in engines) > 0
        await router.post("/remove_worker", url=engines[0].url)
        left = sum(len(each.cache.names()) for each in engines[1:])
        await until(lambda: router.blocks.size == left)
    assert router.blocks.size == 0


@pytest.mark.anyio
@pytest.mark.parametrize("replays", [True, False])
async def test_restarted_engine_is_known_again(follow: Follow, model: NgramModel, replays: bool) -> None:
    http, config = free_port(), events(free_port(), free_port() if replays else None)

    async def known(router: Following, url: str) -> None:
        await until(lambda: router.running.router.pool.find(url).is_healthy)
        if replays:
            await until(lambda: router.in_sync(url) is not None)
        while router.in_sync(url) is None:  # its first batch was sent before the router came
            await router.running.client.post("/flush_cache")
            await anyio.sleep(0.05)

    url = f"http://127.0.0.1:{http}"
    async with follow(url, flags=PATIENT) as router:
        async with engine(model, config, http=http) as first:
            await known(router, url)
            await router.ask(range(10, 300))
            await router.agreed(first)
            assert len(first.cache.names()) == 18
        await until(lambda: router.in_sync(url) is None)
        assert router.blocks.size == 0
        async with engine(model, config, http=http) as second:
            await known(router, url)
            await router.ask(range(500, 700))
            await router.agreed(second)
            assert len(second.cache.names()) == 12


@pytest.mark.anyio
async def test_each_rank_is_known(
    follow: Follow, model: NgramModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slime_policies")
    config = events(free_ports(2), free_ports(2))
    async with engine(model, config, dp_size=2) as two:
        async with follow(two.url, flags=("--dp-aware",)) as router:
            caches = two.backend.caches

            async def agreed() -> None:
                await until(lambda: all(router.agrees(two.url, caches[rank], rank) for rank in (0, 1)))

            await agreed()
            for ids in conversations(3, 12):
                await router.ask(ids)
            await agreed()
            assert all(cache.names() for cache in caches)
        async with follow(two.url):
            await until(lambda: "add --dp-aware" in caplog.text)


@pytest.mark.anyio
async def test_request_goes_where_its_prefix_is_and_not_where_it_was(
    follow: Follow, model: NgramModel
) -> None:
    """The first conversation is evicted by others, of which the router sees nothing but the events."""
    async with (
        engine(model, events(free_port(), free_port())) as one,
        engine(model, events(free_port(), free_port())) as two,
        follow(one.url, two.url) as router,
    ):
        await router.agreed(one, two)
        first, second = list(range(10, 500)), list(range(600, 1000))
        for each, ids in ((one, first), (two, second)):  # around the router
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
            answer = await router.running.client.post(f"{each.url}/generate", json=body)
            assert answer.status_code == 200
        await router.agreed(one, two)
        for ids in (second, first, second, first):
            answer = await router.ask([*ids, 7])
            assert answer["meta_info"]["cached_tokens"] == len(ids) // 16 * 16
        await router.agreed(one, two)


@pytest.mark.anyio
async def test_texts_that_became_ids_go_where_their_blocks_are(start: Start, made: list[CacheAware]) -> None:
    port, replay = free_ports(2), free_ports(2)
    engines = ("--plugin", "engine", "--engine-workers", "2", "--engine-kv-cache-tokens", "4096")
    published = ("--engine-page-size", "4", "--engine-kv-events-config", events(port, replay))
    flags = ("--plugin", "radix_cache", "--policy", "cache_aware", "--kv-events")
    async with start(*engines, *published, *flags) as running:
        blocks = made[-1].blocks
        assert blocks is not None
        workers = list(running.router.pool)
        await until(lambda: all(blocks.in_sync(worker.id) is not None for worker in workers))
        text = " ".join(random.Random(1).choices(["and", "the", "sea", "is", "wide"], k=300))
        asked = {"text": text, "sampling_params": {"max_new_tokens": 4}}
        for worker in reversed(workers):  # around the router: what it has sent tells nothing
            for other in workers:
                await running.client.post(f"{other.url}/flush_cache")
            await until(lambda: blocks.size == 0)
            await running.client.post(f"{worker.url}/generate", json=asked)
            await until(lambda: blocks.size > 0)
            for _ in range(2):
                answer = (await running.client.post("/generate", json=asked)).json()
                prompt = answer["meta_info"]["prompt_tokens"]
                assert answer["meta_info"]["cached_tokens"] == (prompt - 1) // 4 * 4 > 100


# a publisher of the test's own


async def until_connected(worker: Publishing) -> None:
    """The connection is there: the worker has got the subscription."""
    with anyio.fail_after(HANG_S):
        assert await worker.pub.recv() == b"\x01kv"


def names(router: Following, worker: Publishing) -> set[Any] | None:
    own = router.in_sync(worker.url)
    return None if own is None else own.names()


@pytest.mark.anyio
async def test_missing_batch_is_replayed(follow: Follow) -> None:
    async with publishing(zmq) as worker, follow(worker.url, flags=("--plugin", "metrics")) as router:
        await until_connected(worker)
        await until(lambda: worker.replays == [0])
        await worker.send(0, CLEARED)
        await worker.send(1, stored([1, 2]))
        await until(lambda: names(router, worker) == {1, 2})
        worker.keep(2, stored([3], 2, 8))
        worker.keep(3, {"type": "BlockRemoved", "block_hashes": [3]}, stored([4], 2, 8))
        await worker.send(4, stored([5], 4, 12))
        await until(lambda: names(router, worker) == {1, 2, 4, 5})
        assert worker.replays[1] == 2
        name = f'{{worker="{worker.url}"}}'
        assert await router.metrics() == {
            f"known{name}": 1,
            f"blocks{name}": 4,
            "batches_total": 5,
            "replayed_total": 3,
            "malformed_total": 0,
            "dropped_total": 0,
        }


@pytest.mark.anyio
async def test_late_router_learns_all_from_a_replay(follow: Follow) -> None:
    async with publishing(zmq) as worker:
        for number in range(50):
            worker.keep(number, stored([number], number - 1 if number else None, 4 * number))
        worker.left_out = {20, 21, 30}  # a queue was full; they are asked for again
        async with follow(worker.url) as router:
            await until(lambda: names(router, worker) == {*range(50)})
            await until(lambda: worker.replays[:3] == [0, 20, 50])


@pytest.mark.anyio
async def test_live_batches_are_applied_though_no_replay_can_be_asked_for(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_policies.kv_events.subscription._REPLAY_MS", 50)
    async with publishing(zmq, refuses=True) as worker, follow(worker.url) as router:
        await until_connected(worker)
        await worker.send(0, stored([1]))
        await until(lambda: names(router, worker) == {1})


@pytest.mark.anyio
@pytest.mark.parametrize("replays", ["none", "too late", "silent"])
async def test_lost_batch_drops_the_blocks_until_the_cache_is_emptied(
    follow: Follow, replays: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_policies.kv_events.subscription._REPLAY_MS", 50)
    async with (
        publishing(zmq, replays=replays != "none") as worker,
        follow(worker.url, flags=("--plugin", "metrics")) as router,
    ):
        await until_connected(worker)
        await worker.send(0, CLEARED)
        await worker.send(1, stored([1, 2]))
        await until(lambda: names(router, worker) == {1, 2})
        worker.is_silent = replays == "silent"
        await worker.send(3, stored([3], 2, 8))
        await until(lambda: names(router, worker) is None)
        assert router.blocks.size == 0
        assert "batches 2 to 2 are missing" in caplog.text
        assert (await router.metrics())["dropped_total"] == 1
        await router.ask(range(8))  # the router goes on, with its own belief
        await worker.send(4, CLEARED, stored([7]))
        await until(lambda: names(router, worker) == {7})


@pytest.mark.anyio
@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xabBlockStored\x00",
        b"\x92\x01\x91\x05",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 3000,
    ],
)
async def test_malformed_batch_drops_the_blocks(follow: Follow, payload: bytes) -> None:
    async with (
        publishing(zmq, replays=False) as worker,
        follow(worker.url, flags=("--plugin", "metrics")) as router,
    ):
        await until_connected(worker)
        await worker.send(0, stored([1]))
        await worker.pub.send_multipart((b"kv", b"no number", b""))
        await worker.pub.send_multipart((b"kv of another kind",))
        await worker.send(1, stored([2], 1, 4))
        await until(lambda: names(router, worker) == {1, 2})
        await worker.send(2, payload=payload)
        await until(lambda: names(router, worker) is None)
        assert (await router.metrics())["malformed_total"] == 3
        await worker.send(3, CLEARED)
        await until(lambda: names(router, worker) == set())


@pytest.mark.anyio
async def test_batches_that_start_again_replace_all_blocks(follow: Follow) -> None:
    async with publishing(zmq, replays=False) as worker, follow(worker.url) as router:
        await until_connected(worker)
        for number in range(3):
            await worker.send(number, stored([number]) if number == 0 else CLEARED)
        await worker.send(3, stored([9]))
        await until(lambda: names(router, worker) == {9})
        await worker.send(0, stored([5]))
        await until(lambda: names(router, worker) == {5})
        await worker.send(0, stored([6]))
        await until(lambda: names(router, worker) == {6})


@pytest.mark.anyio
async def test_last_batch_that_was_lost_is_asked_for(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_policies.kv_events.subscription._QUIET_MS", 50)
    async with publishing(zmq) as worker, follow(worker.url) as router:
        await until_connected(worker)
        await worker.send(0, stored([1]))
        await until(lambda: names(router, worker) == {1})
        worker.keep(1, stored([2], 1, 4))
        await until(lambda: names(router, worker) == {1, 2})


@pytest.mark.anyio
async def test_router_connects_again_when_the_publisher_hangs_up(follow: Follow) -> None:
    async with publishing(zmq) as worker, follow(worker.url) as router:
        worker.keep(0, stored([1]))
        await until(lambda: names(router, worker) == {1})
        address = worker.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        worker.pub.close(linger=0)
        await until(lambda: names(router, worker) is None)
        worker.keep(0, stored([3, 4]))
        worker.pub = worker.pub.context.socket(zmq.XPUB)
        worker.pub.bind(address)
        await until(lambda: names(router, worker) == {3, 4})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({}, "names no publisher"),
        ([], "names no publisher"),
        ({"kv_events": None}, "names no publisher"),
        ({"kv_events": {"publisher": "kafka"}}, "names no publisher"),
        ({"kv_events": {"publisher": "zmq", "endpoint_host": "*"}}, "names no publisher"),
        (
            {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": 1}},
            "names no publisher",
        ),
        (
            {
                "kv_events": {
                    "publisher": "zmq",
                    "endpoint_host": "*",
                    "endpoint_port_base": 5557,
                    "dp_size": 2,
                }
            },
            "each of its 2 data-parallel ranks has a cache; add --dp-aware",
        ),
        (
            {"kv_events": {"publisher": "zmq", "endpoint_host": "169.254.169.254", "endpoint_port_base": 80}},
            "169.254",
        ),
    ],
)
async def test_reason_for_no_events_is_logged_once(
    follow: Follow, told: Any, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_policies.kv_events.subscriptions._LATER_S", 0.01)
    caplog.set_level(logging.INFO, "slime_policies")
    async with publishing(zmq, told=told) as worker, follow(worker.url) as router:
        await until(lambda: f"no KV events of {worker.url}: " in caplog.text)
        await router.ask(range(8))
        await anyio.sleep(0.1)
    [message] = [each for each in caplog.messages if each.startswith("no KV events")]
    assert reason in message


@pytest.mark.anyio
async def test_router_connects_again_to_a_publisher_that_never_answers(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_policies.kv_events.subscription._HANDSHAKE_MS", 100)
    came = 0

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        await reader.read()
        writer.close()

    port = free_port()
    facts = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "", "dp_size": 1}
    told = {"kv_events_config": events(port), "kv_events": {**facts, "block_size": 4}}
    server = await asyncio.start_server(accepted, "127.0.0.1", port)
    async with server, publishing(zmq, told=told) as worker, follow(worker.url):
        with anyio.fail_after(10):  # libzmq itself gives up after 30 seconds
            while came < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_prefill_workers_are_followed_for_their_own_policy(
    start: Start, made: list[CacheAware]
) -> None:
    async with publishing(zmq) as prefill, publishing(zmq) as decode:
        prefill.keep(0, stored([1]))
        flags = ("--pd-disaggregation", "--prefill-policy", "cache_aware", "--kv-events")
        async with start(*flags, "--prefill", prefill.url, "none", "--decode", decode.url):
            [policy] = made
            assert policy.blocks is not None
            blocks = policy.blocks
            await until(lambda: blocks.size == 1)
            assert decode.replays == []


# flags


def test_flags_without_effect_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(["--policy", "random", "--kv-events"])
        build(["--policy", "cache_aware", "--kv-events-max-blocks", "5"])
    assert caplog.messages == [
        "--kv-events has no effect: it is for policy auto or cache_aware",
        "--kv-events-max-blocks has no effect: it is for --kv-events",
    ]


def test_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slime_policies.settings.find_spec", lambda name: None)
    assert main(["--policy", "cache_aware", "--kv-events"]) == 2
    assert "--kv-events needs pyzmq: pip install 'slime-router[kv-events]'" in capsys.readouterr().err
