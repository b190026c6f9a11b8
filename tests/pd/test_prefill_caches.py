"""``cache_aware`` for prefill workers is told what these had in their caches."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pd.halves import Pairs, disaggregated
from routers import Start
from slime_engine.model import NgramModel

pytestmark = pytest.mark.anyio

CACHE: dict[str, Any] = {"kv_cache_tokens": 4096, "page_size": 16}
PROMPTS = [random.Random(seed).choices(range(300, 1200), k=1000) for seed in range(12)]


async def ask(pairs: Pairs, number: int, **more: Any) -> int:
    """Send a prompt. Returns the number of the prefill engine that got it."""
    before = [len(half.journal()) for half in pairs.prefills]
    body = {"input_ids": PROMPTS[number], "sampling_params": {"max_new_tokens": 2}, **more}
    answer = await pairs.running.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    after = [len(half.journal()) for half in pairs.prefills]
    (chosen,) = [place for place in range(len(before)) if after[place] > before[place]]
    return chosen


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize("policies", [("--policy", "cache_aware"), ("--prefill-policy", "cache_aware")])
async def test_prompts_that_a_prefill_engine_evicted_are_spread_again(
    start: Start, model: NgramModel, policies: tuple[str, ...], more: dict[str, Any]
) -> None:
    async with disaggregated(start, model, *policies, prefills=2, decodes=2, **CACHE) as pairs:
        pool = pairs.running.router.pool
        other = pool.find(pairs.prefills[1].url)
        pool.hold(other, "test", "a test")
        for number in [*range(12), 5, 6, 7]:  # the cache holds four
            assert await ask(pairs, number, **more) == 0
        pool.release(other, "test")
        found = [await ask(pairs, number, **more) for number in (7, 1, 2, 3, 4)]
        assert found[0] == 0
        assert found.count(1) == 2  # else all would stay where they once were
