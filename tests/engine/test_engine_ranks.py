"""Data-parallel ranks of the embedded engine: each has a cache, a batch and a pace of its own."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import anyio
import pytest

from engine.served import Served, served
from slime_engine.dispatch import Dispatcher
from slime_engine.model import NgramModel
from slime_engine.requests import GenerateRequest
from slime_engine.room import Room
from slime_engine.sampling import SamplingParams
from slime_engine.settings import Settings

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 1100))
CACHE: dict[str, Any] = {"kv_cache_tokens": 4096, "page_size": 16}
ONE = {"max_new_tokens": 1}


async def cached(engine: Served, rank: int | None, ids: list[int] = PROMPT) -> tuple[int, int]:
    """Generate one token after ``ids``. Return the rank and the cached tokens that the answer names."""
    named = {} if rank is None else {"routed_dp_rank": rank}
    meta = (await engine.generate(input_ids=ids, sampling_params=ONE, **named))["meta_info"]
    return meta["dp_rank"], meta["cached_tokens"]


async def test_rank_knows_only_what_it_has_computed(model: NgramModel) -> None:
    async with served(lambda: model, Settings(dp_size=3, **CACHE)) as engine:
        assert [await cached(engine, rank) for rank in (0, 1, 0, 1, 2)] == [
            (0, 0), (1, 0), (0, 784), (1, 784), (2, 0),
        ]  # fmt: skip
        assert (await engine.client.post("/flush_cache")).status_code == 200
        assert [await cached(engine, rank) for rank in range(3)] == [(0, 0), (1, 0), (2, 0)]


async def test_cache_of_one_rank_is_as_large_as_the_flag_says(model: NgramModel) -> None:
    prompts = [[start, *PROMPT] for start in range(200, 210)]
    async with served(lambda: model, Settings(dp_size=2, **CACHE)) as engine:
        for ids in prompts:  # one rank has room for five
            await cached(engine, 0, ids)
        await cached(engine, 1, prompts[0])
        assert await cached(engine, 1, prompts[0]) == (1, 800)
        assert await cached(engine, 0, prompts[-1]) == (0, 800)
        assert await cached(engine, 0, prompts[0]) == (0, 0)


async def test_requests_without_a_rank_go_to_the_ranks_in_turn(model: NgramModel) -> None:
    async with served(lambda: model, Settings(dp_size=3, **CACHE)) as engine:
        found = [await cached(engine, None) for _ in range(6)]
        assert [rank for rank, _ in found] == [0, 1, 2, 0, 1, 2]
        assert [tokens for _, tokens in found] == [0, 0, 0, 784, 784, 784]


async def test_openai_request_goes_to_the_rank_that_it_names(model: NgramModel) -> None:
    async with served(lambda: model, Settings(dp_size=3)) as engine:
        for name, rank in (("routed_dp_rank", 2), ("data_parallel_rank", 1)):
            await engine.post("/v1/completions", prompt="Hi", max_tokens=1, **{name: rank})
        assert [entry["dp_rank"] for entry in await engine.journal()] == [2, 1]


async def test_long_prompt_delays_its_own_rank_only(model: NgramModel) -> None:
    settings = Settings(dp_size=2, prefill_tokens_per_second=10, **CACHE)  # a prompt takes 80 s
    async with served(lambda: model, settings) as engine, anyio.create_task_group() as tasks:
        long = {"rid": "long", "input_ids": PROMPT, "sampling_params": ONE, "routed_dp_rank": 0}
        tasks.start_soon(lambda: engine.client.post("/generate", json=long))
        await engine.until(lambda scheduler: "long" in scheduler.running)
        assert await cached(engine, 1, [300]) == (1, 0)
        loads = (await engine.get("/v1/loads"))["loads"]
        assert [load["num_running_reqs"] for load in loads] == [1, 0]
        tasks.cancel_scope.cancel()


async def test_each_rank_runs_as_many_sequences_as_the_flag_says(model: NgramModel) -> None:
    settings = Settings(dp_size=2, max_running_requests=2, tokens_per_second=20)
    async with served(lambda: model, settings) as engine, anyio.create_task_group() as tasks:
        body = {"input_ids": [300], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        for number in range(6):
            rank = 0 if number < 5 else 1
            asked = {**body, "rid": f"r{number}", "routed_dp_rank": rank}
            tasks.start_soon(partial(engine.client.post, "/generate", json=asked))
        await engine.until(lambda scheduler: len(scheduler.running) == 3 and len(scheduler.waiting) == 3)
        loads = (await engine.get("/v1/loads"))["loads"]
        assert [(load["num_running_reqs"], load["num_waiting_reqs"]) for load in loads] == [(2, 3), (1, 0)]
        tasks.cancel_scope.cancel()


async def test_decode_engine_skips_the_prompt_and_reports_the_prefill_cache(
    model: NgramModel,
) -> None:
    slow = {"prefill_tokens_per_second": 10, **CACHE}  # a prompt takes 80 s, if it is computed
    async with (
        served(lambda: model, Settings(disaggregation_mode="prefill", **CACHE)) as prefill,
        served(lambda: model, Settings(disaggregation_mode="decode", **slow)) as decode,
    ):
        found = []
        for room in range(2):
            body: dict[str, Any] = {
                "input_ids": PROMPT,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": prefill.client.base_url.port,
                "bootstrap_room": room,
                "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
            }
            async with prefill.asking(**body):
                meta = (await decode.generate(**body))["meta_info"]
            found.append((meta["cached_tokens"], meta["completion_tokens"]))
    assert found == [(0, 3), (784, 3)]


def test_prefill_engine_chooses_ranks_by_rooms() -> None:
    def request(room: int | None, rank: int | None = None) -> GenerateRequest:
        place = None if room is None else Room("127.0.0.1", 1, room)
        return GenerateRequest("r", "a", None, SamplingParams(), room=place, dp_rank=rank)

    prefill = Dispatcher(Settings(dp_size=4, disaggregation_mode="prefill"))
    assert [prefill.rank_of(request(room)) for room in (6, 6, 7, None, None)] == [2, 2, 3, 0, 1]
    assert prefill.rank_of(request(6, rank=1)) == 1
    decode = Dispatcher(Settings(dp_size=4, disaggregation_mode="decode"))
    assert Counter(decode.rank_of(request(6)) for _ in range(8)) == dict.fromkeys(range(4), 2)
