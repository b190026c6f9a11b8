"""A worker with a publisher of KV events that sends what a test says, and a router that follows it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgpack  # type: ignore[import-untyped]  # it has no annotations
import orjson

from deadlines import until
from ports import free_port
from slime_engine.app import make_backend_app
from slime_engine.model import NgramModel
from slime_engine.settings import Settings as EngineSettings
from slime_engine.simulated_cache import SimulatedCache
from slime_engine.stateless import StatelessBackend
from slime_http.serving import serving
from slime_policies.kv_events import Blocks, WorkerBlocks
from slime_testing import FakeEngine, Running

__all__ = ["Engine", "Follow", "Following", "Publishing", "engine", "events", "publishing", "stored"]

BLOCK = 4
_NUMBER = 8


def events(port: int, replay: int | None = None, **more: Any) -> str:
    """An engine's ``--kv-events-config`` for these ports."""
    told = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", **more}
    if replay is not None:
        told["replay_endpoint"] = f"tcp://127.0.0.1:{replay}"
    return orjson.dumps(told).decode()


@dataclass(frozen=True)
class Engine:
    """An embedded engine."""

    url: str
    backend: StatelessBackend

    @property
    def cache(self) -> SimulatedCache:
        return self.backend.caches[0]


@asynccontextmanager
async def engine(
    model: NgramModel, config: str | None, *, http: int = 0, **more: Any
) -> AsyncIterator[Engine]:
    """An engine on the port ``http`` (0: any) with room for 2,048 tokens, in blocks of 16."""
    known: dict[str, Any] = {"kv_cache_tokens": 2048, "page_size": 16, "kv_events_config": config} | more
    settings = EngineSettings(**known)
    backend = StatelessBackend(model, settings)
    async with serving(make_backend_app(settings, lambda: backend), port=http, grace_s=1) as url:
        yield Engine(url, backend)


@dataclass(frozen=True)
class Following:
    """A router that follows KV events, and the blocks that it knows."""

    running: Running
    blocks: Blocks

    def in_sync(self, url: str, rank: int | None = None) -> WorkerBlocks | None:
        worker = self.running.router.pool.find(url)
        if rank is not None and not worker.targets:
            return None
        return self.blocks.in_sync(worker.id if rank is None else worker.targets[rank].id)

    def agrees(self, url: str, cache: SimulatedCache, rank: int | None = None) -> bool:
        """Return True when the router knows the blocks in ``cache``, and no others."""
        own = self.in_sync(url, rank)
        return own is not None and own.names() == cache.names()

    async def agreed(self, *engines: Engine) -> None:
        await until(lambda: all(self.agrees(each.url, each.cache) for each in engines))

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.running.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ask(self, ids: Sequence[int], **more: Any) -> Any:
        return await self.post(
            "/generate", input_ids=list(ids), sampling_params={"max_new_tokens": 4}, **more
        )

    async def metrics(self) -> dict[str, float]:
        lines = (await self.running.client.get("/metrics")).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith("slime_kv_events_"))
        return {name.removeprefix("slime_kv_events_"): float(value) for name, _, value in pairs}


Follow = Callable[..., AbstractAsyncContextManager[Following]]


def stored(names: Sequence[int], parent: int | None = None, first: int = 0) -> dict[str, Any]:
    """An event of blocks of four ids, from ``first`` on."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": list(range(first, first + BLOCK * len(names))),
        "block_size": BLOCK,
        "lora_id": None,
    }


@dataclass
class Publishing:
    """A worker; ``pub`` is its socket. ``kept``: payloads that it can replay, by number."""

    url: str
    pub: Any
    kept: dict[int, bytes] = field(default_factory=dict)
    replays: list[int] = field(default_factory=list)
    #: Numbers that the next replay leaves out, as a socket does whose queue is full.
    left_out: set[int] = field(default_factory=set)
    is_silent: bool = False

    async def send(self, number: int, *events: dict[str, Any], payload: bytes | None = None) -> None:
        packed = self.keep(number, *events) if payload is None else payload
        await self.pub.send_multipart((b"kv", number.to_bytes(_NUMBER, "big"), packed))

    def keep(self, number: int, *events: dict[str, Any]) -> bytes:
        """Keep a batch for replays without sending it."""
        packed: bytes = msgpack.packb([1.5, list(events), 0])
        self.kept[number] = packed
        return packed

    async def serve_replays(self, router: Any) -> None:
        while True:
            peer, empty, first = await router.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            if self.is_silent:
                continue
            left_out, self.left_out = self.left_out, set()
            for number, payload in sorted(self.kept.items()):
                if number >= self.replays[-1] and number not in left_out:
                    await router.send_multipart((peer, empty, number.to_bytes(_NUMBER, "big"), payload))
            await router.send_multipart((peer, empty, b"\xff" * _NUMBER, b""))


@asynccontextmanager
async def publishing(
    zmq: Any, *, replays: bool = True, refuses: bool = False, told: Any = None
) -> AsyncIterator[Publishing]:
    """A worker whose ``/server_info`` says ``told``, or the truth. ``zmq``: the module, which may be missing.

    ``refuses``: connections for replays are refused.
    """
    port, replay = free_port(), free_port()
    truth = {
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": port,
            "topic": "kv",
            "block_size": BLOCK,
            "dp_size": 1,
        },
        "kv_events_config": events(port, replay if replays else None),
    }

    fake = FakeEngine()
    fake.answers["/server_info"] = 200, orjson.dumps(truth if told is None else told)
    fake.rest = lambda _: {"text": "", "meta_info": {"prompt_tokens": 8, "cached_tokens": 0}}
    context = zmq.asyncio.Context()
    try:
        pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        pub.bind(f"tcp://127.0.0.1:{port}")
        if not refuses:
            router.bind(f"tcp://127.0.0.1:{replay}")
        async with serving(fake.app, grace_s=1) as url, anyio.create_task_group() as tasks:
            worker = Publishing(url, pub)
            tasks.start_soon(worker.serve_replays, router)
            yield worker
            tasks.cancel_scope.cancel()
    finally:
        context.destroy(linger=0)
