"""Policies with data-parallel ranks: each rank has its own load and its own prefixes, held against the engines'."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

from engine.served import Served, served
from plugged import until
from policies.asking import load_in
from routers import Start
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_testing import Running

pytestmark = pytest.mark.anyio

BLOCK = 16


@dataclass
class RankedFleet:
    """A router and its engines."""

    running: Running
    engines: list[Served]

    async def generate(self, ids: list[int], **sampling: Any) -> dict[str, Any]:
        body = {"input_ids": ids, "sampling_params": {"ignore_eos": True, **sampling}}
        answer = await self.running.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        output: dict[str, Any] = answer.json()
        return output

    def entries(self) -> list[tuple[int, int, list[int]]]:
        """Return the engine, the rank and the prompt of each generation, by the journals."""
        return [
            (number, entry.dp_rank, entry.input_ids.tolist())
            for number, engine in enumerate(self.engines)
            for entry in engine.host.engine.journal.entries()
        ]


@asynccontextmanager
async def fleet(
    start: Start, model: NgramModel, *flags: str, engines: int = 1, ranks: int = 2, **settings: Any
) -> AsyncIterator[RankedFleet]:
    async with AsyncExitStack() as stack:
        served_by = [
            await stack.enter_async_context(served(lambda: model, Settings(dp_size=ranks, **settings)))
            for _ in range(engines)
        ]
        running = await stack.enter_async_context(start("--disable-health-check", *flags))
        for engine in served_by:
            await running.router.add_worker(str(engine.client.base_url))
        yield RankedFleet(running, served_by)


def random_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(300, 1200), k=count)


async def converse(told: RankedFleet) -> tuple[int, int]:
    """Hold eight conversations of four turns in turn. Return the cached tokens, and the most that there can be."""
    histories = [random_ids(number, 200 + 16 * number) for number in range(8)]
    cached = most = 0
    for turn in range(4):
        for number, history in enumerate(histories):
            output = await told.generate(history, max_new_tokens=5)
            cached += output["meta_info"]["cached_tokens"]
            if turn:
                most += (
                    (len(history) - 31) // BLOCK * BLOCK
                )  # the last token was not computed, the question is new
            history += [*output["output_ids"], *random_ids(100 * turn + number, 30)]
    return cached, most


async def test_conversation_returns_to_the_rank_that_has_it(start: Start, model: NgramModel) -> None:
    caches = {"engines": 2, "ranks": 3, "kv_cache_tokens": 16_000, "page_size": BLOCK}
    async with fleet(start, model, "--policy", "cache_aware", "--dp-aware", **caches) as told:
        cached, most = await converse(told)
        assert cached == most > 0
        places: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        for engine, rank, ids in told.entries():
            places.setdefault(tuple(ids[:200]), set()).add((engine, rank))
        assert len(places) == 8
        assert all(len(each) == 1 for each in places.values())
        assert len({place for (place,) in places.values()}) == 6
    async with fleet(start, model, "--policy", "cache_aware", **caches) as told:
        cached, most = await converse(told)
        assert cached < most  # the server uses its ranks in turn


async def test_each_rank_has_its_own_tokens_in_flight(start: Start, model: NgramModel) -> None:
    flags = ("--dp-aware", "--policy", "least_inflight", "--load", "tokens")
    async with fleet(start, model, *flags, tokens_per_second=50) as told, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: told.generate([300], max_new_tokens=5000))
        await until(lambda: len(told.entries()) == 1)
        for number in range(6):  # four at once
            tasks.start_soon(partial(told.generate, [301 + number], max_new_tokens=40))
        await until(lambda: len(told.entries()) == 7)
        [long] = [rank for _, rank, ids in told.entries() if ids == [300]]
        assert Counter(rank for _, rank, _ in told.entries()) == {long: 1, 1 - long: 6}
        tasks.cancel_scope.cancel()


async def test_load_that_an_engine_reports_is_that_of_the_rank(start: Start, model: NgramModel) -> None:
    flags = (
        "--dp-aware",
        "--policy",
        "power_of_two",
        "--load",
        "engine",
        "--load-poll-interval-secs",
        "0.5",
    )
    async with fleet(start, model, *flags, tokens_per_second=20) as told, anyio.create_task_group() as tasks:
        [engine] = told.engines
        body = {
            "input_ids": random_ids(1, 2000),
            "routed_dp_rank": 1,
            "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
        }
        tasks.start_soon(lambda: engine.client.post("/generate", json=body))  # by another client
        [worker] = told.running.router.pool
        loads = load_in(told.running, worker)
        await until(lambda: loads.loads(worker.targets)[1] >= 2000)
        for number in range(4):
            await told.generate([301 + number], max_new_tokens=1)
        assert [rank for _, rank, ids in told.entries() if len(ids) == 1] == [0] * 4
        tasks.cancel_scope.cancel()
