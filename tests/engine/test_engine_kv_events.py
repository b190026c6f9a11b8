"""KV events that the engine publishes, read with a plain ZeroMQ socket and a plain msgpack decoder."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import orjson
import pytest

from deadlines import HANG_S
from engine.served import Serve
from ports import free_port, free_ports
from routers import Start
from slime_engine.command import main as engine_main
from slime_engine.kv_events import KVEventsConfig
from slime_engine.settings import Settings
from slime_engine.simulated_cache import SimulatedCache

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")
KVPublisher = pytest.importorskip("slime_engine.kv_publisher").KVPublisher


def config(**more: Any) -> tuple[int, dict[str, Any]]:
    """A free port, and settings of an engine that publishes there."""
    port = free_port()
    told = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "topic": "kv", **more}
    return port, {"kv_cache_tokens": 64, "page_size": 4, "kv_events_config": orjson.dumps(told).decode()}


@asynccontextmanager
async def socket(kind: int, port: int) -> AsyncIterator[Any]:
    context = zmq_asyncio.Context()
    try:
        opened = context.socket(kind)
        if kind == zmq.SUB:
            opened.subscribe(b"kv")
        opened.connect(f"tcp://127.0.0.1:{port}")
        yield opened
    finally:
        context.destroy(linger=0)


def number(frame: bytes) -> int:
    return int(struct.unpack(">q", frame)[0])


async def replayed(dealer: Any, first: int = 0) -> list[tuple[int, Any]]:
    await dealer.send_multipart((b"", struct.pack(">q", first)))
    batches: list[tuple[int, Any]] = []
    while True:
        empty, sequence, payload = await dealer.recv_multipart()
        assert empty == b""
        if number(sequence) == -1:
            assert payload == b""
            return batches
        batches.append((number(sequence), msgpack.unpackb(payload)))


@pytest.mark.anyio
async def test_engine_publishes_changes_of_its_cache_in_sglang_frames(serve: Serve) -> None:
    replay = free_port()
    port, settings = config(replay_endpoint=f"tcp://127.0.0.1:{replay}")
    async with (
        serve(**settings) as engine,
        socket(zmq.SUB, port) as sub,
        socket(zmq.DEALER, replay) as dealer,
    ):
        with anyio.fail_after(HANG_S):
            assert [events for _, (_, events, _) in await replayed(dealer)] == [
                [{"type": "AllBlocksCleared"}]
            ]
            ids = list(range(10, 20))
            while not await sub.poll(50):  # until the subscription has reached the engine
                await engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
                await engine.post("/flush_cache")
            frames = [await sub.recv_multipart()]
            await engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
            before = await replayed(dealer)
            await engine.generate(input_ids=[*ids, 20, 21, 22], sampling_params={"max_new_tokens": 1})
            await engine.generate(input_ids=list(range(100, 160)), sampling_params={"max_new_tokens": 1})
            await engine.post("/flush_cache")
            batches = await replayed(dealer)
            while number(frames[-1][1]) < batches[-1][0]:
                frames.append(await sub.recv_multipart())
        assert {topic for topic, _, _ in frames} == {b"kv"}
        heard = [(number(sequence), msgpack.unpackb(payload)) for _, sequence, payload in frames]
        assert heard == batches[-len(heard) :]
        assert [sequence for sequence, _ in batches] == list(range(len(batches)))
        assert all(rank == 0 and type(ts) is float for _, (ts, _, rank) in batches)

        first = before[-1][1][1]
        assert [event["type"] for event in first] == ["BlockStored"]
        one, two = first[0]["block_hashes"]
        assert first[0] == {
            "type": "BlockStored",
            "block_hashes": [one, two],
            "parent_block_hash": None,
            "token_ids": ids[:8],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
        }
        later = [event for _, (_, events, _) in batches[len(before) :] for event in events]
        assert [event["type"] for event in later] == [
            "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared",
        ]  # fmt: skip
        assert later[0]["parent_block_hash"] == two
        assert later[0]["token_ids"] == [18, 19, 20, 21]
        assert later[1]["token_ids"] == list(range(100, 160))
        assert later[2]["block_hashes"] == [*later[0]["block_hashes"], two]  # 18 blocks, and room for 16
        assert await replayed(dealer, len(batches) - 1) == batches[-1:]
        assert await replayed(dealer, len(batches)) == []


@pytest.mark.anyio
async def test_replay_has_the_last_batches_only(serve: Serve) -> None:
    replay = free_port()
    _, settings = config(replay_endpoint=f"tcp://127.0.0.1:{replay}", buffer_steps=2)
    async with serve(**settings) as engine, socket(zmq.DEALER, replay) as dealer:
        for _ in range(3):
            await engine.post("/flush_cache")
        await dealer.send_multipart((b"no request",))  # is ignored
        with anyio.fail_after(HANG_S):
            assert [sequence for sequence, _ in await replayed(dealer)] == [2, 3]


@pytest.mark.anyio
async def test_each_rank_has_a_cache_and_a_publisher_of_its_own(serve: Serve) -> None:
    first, replay = free_ports(2), free_ports(2)
    _, settings = config(endpoint=f"tcp://127.0.0.1:{first}", replay_endpoint=f"tcp://127.0.0.1:{replay}")
    stored = []
    async with serve(dp_size=2, **settings) as engine:
        for rank in (1, 1, 0):
            ids = list(range(50 + rank, 60))
            await engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1}, routed_dp_rank=rank)
        for rank in (0, 1):
            async with socket(zmq.DEALER, replay + rank) as dealer:
                with anyio.fail_after(HANG_S):
                    batches = await replayed(dealer)
            assert {told for _, (_, _, told) in batches} == {rank}
            events = [event for _, (_, each, _) in batches for event in each]
            stored.append([event.get("token_ids") for event in events])
    assert stored == [[None, list(range(50, 58))], [None, list(range(51, 59))]]


@pytest.mark.anyio
async def test_server_info_names_the_publisher(serve: Serve) -> None:
    port, settings = config()
    async with serve(dp_size=2, **settings) as engine:
        info = await engine.get("/server_info")
    assert info["kv_events"] == {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": port,
        "topic": "kv",
        "block_size": 4,
        "dp_size": 2,
    }
    assert (info["kv_events_config"], info["page_size"]) == (settings["kv_events_config"], 4)
    async with serve(kv_events_config='{"publisher": "null"}') as engine:
        assert (await engine.get("/server_info"))["kv_events"] is None


def test_the_last_block_of_a_prompt_that_ends_within_it_is_not_published() -> None:
    cache = SimulatedCache(64, 4)
    cache.store(list(range(8)), 8)  # before anything is recorded
    cache.record()
    cache.store([1, 2, 3], 3)
    assert cache.take_events() == [{"type": "AllBlocksCleared"}]
    assert cache.match(list(range(8)), 8) == 0
    assert cache.take_events() == []


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("{", "wanted a JSON object"),
        ("[]", "wanted a JSON object with keys of publisher, endpoint"),
        ('{"publisher": "zmq", "port": 1}', "wanted a JSON object with keys of publisher, endpoint"),
        ('{"publisher": "kafka"}', "publisher must be null or zmq"),
        ('{"endpoint": "ipc://x"}', "endpoint must be an address such as tcp://"),
        ('{"endpoint": null}', "endpoint must be an address such as tcp://"),
        ('{"replay_endpoint": "tcp://*:65536"}', "replay_endpoint must be an address such as tcp://"),
        ('{"endpoint": "tcp://*:65535", "publisher": "zmq"}', "endpoint must be an address such as tcp://"),
        ('{"buffer_steps": 1.5}', "buffer_steps must be a whole number"),
        ('{"topic": 5}', "topic must be a string"),
    ],
)
def test_invalid_config_is_refused(told: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-cache-tokens", "64", "--dp-size", "2", "--kv-events-config", told]
    assert engine_main(flags) == 2
    assert f"--kv-events-config: {message}" in capsys.readouterr().err


def test_publisher_needs_a_cache_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give kv_cache_tokens, too"):
        Settings(kv_events_config='{"publisher": "zmq"}')
    monkeypatch.setattr("slime_engine.kv_events.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'slime-router\[kv-events\]'"):
        KVEventsConfig.of('{"publisher": "zmq"}')
    assert KVEventsConfig.of("{}").publisher == "null"


@pytest.mark.anyio
async def test_engines_of_the_plugin_have_ports_of_their_own(start: Start) -> None:
    port, replay = free_ports(4), free_ports(4)
    told = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }
    flags = ("--engine-kv-cache-tokens", "64", "--engine-dp-size", "2", "--engine-workers", "2")
    async with start("--plugin", "engine", *flags, "--engine-kv-events-config", orjson.dumps(told).decode()):
        for offset in range(4):
            async with socket(zmq.DEALER, replay + offset) as dealer:
                with anyio.fail_after(HANG_S):
                    [(_, (_, _, rank))] = await replayed(dealer)
            assert rank == offset % 2


@pytest.mark.anyio
async def test_taken_port_is_named(serve: Serve) -> None:
    _, settings = config()
    async with serve(**settings):
        with pytest.raises(OSError, match="kv_events_config: Address already in use"):
            KVPublisher.bound(KVEventsConfig.of(settings["kv_events_config"]), 1).__enter__()
