"""The simulated KV cache: LRU over blocks, and the time that missing tokens take."""

from __future__ import annotations

import anyio
import pytest

from engine.served import served
from slime_engine.model import NgramModel
from slime_engine.settings import Settings
from slime_engine.simulated_cache import SimulatedCache


def test_only_whole_blocks_of_the_same_prefix_are_known() -> None:
    cache = SimulatedCache(64, 4)
    ids = list(range(10))
    cache.store(ids, 10)
    assert cache.match(ids, 10) == 8
    assert cache.match(ids, 7) == 4
    assert cache.match([*ids[:5], 99, *ids[6:]], 10) == 4
    assert cache.match(ids[4:], 6) == 0  # the same tokens in another place
    cache.clear()
    assert cache.match(ids, 10) == 0


def test_the_least_recently_used_goes_first_and_an_end_before_its_start() -> None:
    cache = SimulatedCache(16, 4)
    one, two, three = [[start + place for place in range(8)] for start in (100, 200, 300)]
    cache.store(one, 8)
    cache.store(two, 8)
    cache.store(one, 8)  # used again
    cache.store(three, 4)
    assert [cache.match(ids, 8) for ids in (one, two, three)] == [8, 4, 4]


@pytest.mark.anyio
async def test_missing_tokens_take_their_time_and_cached_ones_none(model: NgramModel) -> None:
    settings = Settings(kv_cache_tokens=4096, page_size=16, prefill_tokens_per_second=4000)
    async with served(lambda: model, settings) as engine:
        times, cached = [], []
        for _ in range(2):
            begun = anyio.current_time()
            answer = await engine.generate(
                input_ids=list(range(5, 1005)), sampling_params={"max_new_tokens": 1}
            )
            times.append(anyio.current_time() - begun)
            cached.append(answer["meta_info"]["cached_tokens"])
    assert cached == [0, 992]
    assert times[0] >= 0.25  # 1,000 tokens
    assert times[1] < 0.1  # 8


@pytest.mark.anyio
async def test_each_token_of_a_scored_prompt_takes_its_time(model: NgramModel) -> None:
    settings = Settings(kv_cache_tokens=4096, page_size=16, prefill_tokens_per_second=2000)
    prompt = list(range(5, 205))  # computed in four queries
    async with served(lambda: model, settings) as engine:

        async def ask(**more: int) -> tuple[float, int]:
            begun = anyio.current_time()
            sampling = {"max_new_tokens": 1}
            answer = await engine.generate(
                input_ids=prompt, return_logprob=True, sampling_params=sampling, **more
            )
            return anyio.current_time() - begun, answer["meta_info"]["cached_tokens"]

        scored_s, cached = await ask(logprob_start_len=0)
        assert scored_s >= 0.1  # 200 tokens
        assert cached == 0
        again_s, cached = await ask(logprob_start_len=100)
        assert again_s >= 0.052  # 104 tokens: scored tokens are computed again
        assert cached == 96
        _, cached = await ask()
        assert cached == 192


@pytest.mark.parametrize("name", ["kv_cache_tokens", "prefill_tokens_per_second"])
def test_a_real_model_has_no_simulated_cache(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is for the simulated KV cache of the backend ngram"):
        Settings(backend="transformers", model="m", **{name: 5})  # type: ignore[arg-type]
