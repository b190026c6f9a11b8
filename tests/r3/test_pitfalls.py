"""Faults of the first generation with routed experts. Others are named so where they are tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from plugged import Recording
from r3.replays import rows_in
from r3.telling import base64_of, leaf_of, telling, turn
from radix_cache.scripted import ScriptedEngine
from routers import BARE
from slime_engine.model import NgramModel
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

ASKED = {"return_routed_experts": True, "routed_experts_start_len": 1}
#: Fields that the router does not know.
UNKNOWN = {"mystery": {"kept": [1.5, None, "é"]}}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Why?"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "Why?"}]},
    "/v1/completions": {"model": "m", "prompt": "Why?"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asked", [{}, ASKED])
@pytest.mark.parametrize("plugins", ["r3", "radix_cache r3"])
async def test_pitfall_26_the_fields_of_a_request_reach_the_worker(
    start: Start, checkpoint: str, path: str, asked: dict[str, Any], plugins: str
) -> None:
    worker, body = Recording(), BODIES[path]
    named = [word for name in plugins.split() for word in ("--plugin", name)]
    tokenizer = ("--hf-checkpoint", checkpoint) if "radix_cache" in plugins else ()
    async with (
        serving(worker) as url,
        start(*BARE, *named, *tokenizer, "--worker-urls", url) as running,
    ):
        answer = await running.client.post(path, json=body | asked | UNKNOWN)
        assert answer.status_code == 200, answer.text
    sent = orjson.loads(*worker.bodies)
    wanted = body | (asked or {"return_routed_experts": True}) | UNKNOWN
    if "input_ids" in sent:
        wanted = {name: value for name, value in wanted.items() if name != "text"}
    assert {name: sent[name] for name in wanted} == wanted
    assert asked or "routed_experts_start_len" not in sent


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asked", [{}, ASKED])
async def test_pitfall_26_the_fields_of_chats_reach_the_worker(
    start: Start, model: NgramModel, checkpoint: str, path: str, asked: dict[str, Any]
) -> None:
    engine = ScriptedEngine(model.tokenizer)
    plugins = ("--plugin", "radix_cache", "--plugin", "openai", "--plugin", "r3")
    async with (
        serving(engine.app) as url,
        start(*BARE, *plugins, "--hf-checkpoint", checkpoint, "--worker-urls", url) as running,
    ):
        engine.script.append([5, engine.eos])
        answer = await running.client.post(path, json=BODIES[path] | asked | UNKNOWN)
        assert answer.status_code == 200, answer.text
    (sent,) = engine.asked
    assert sent["input_ids"]
    assert sent["return_routed_experts"] is True
    assert sent.get("routed_experts_start_len") == asked.get("routed_experts_start_len")
    assert path != "/generate" or sent["mystery"] == UNKNOWN["mystery"]


@pytest.mark.parametrize(
    ("expert", "bytes_"), [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 4), (-1, 4)]
)
async def test_pitfall_28_a_value_takes_the_bytes_that_it_needs(
    start: Start, model: NgramModel, checkpoint: str, expert: int, bytes_: int
) -> None:
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, _):
        values = np.full((9, 6), 3)
        values[4, 2] = expert
        leaf = await turn(client, 10, {"routed_experts": base64_of(values)}, "s")
        assert rows_in(leaf["routed_experts"]).reshape(-1, 6).tolist() == values.tolist()
        assert (await client.stats())["token_rows"]["routed_experts"]["bytes"] == 9 * 6 * bytes_


async def test_pitfall_28_only_the_turns_with_high_experts_are_wide(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2") as (client, _):
        values, tokens, stored = np.empty((0, 6), int), [*range(5, 13)], 0
        for expert, width in ((7, 1), (300, 2), (70_000, 4), (8, 1)):
            start_len = len(values)
            new = np.full((len(tokens) + 1 - start_len, 6), expert)
            meta = {"routed_experts": base64_of(new), "routed_experts_start_len": start_len}
            leaf = await turn(client, 0, meta, "s", given=tokens)
            values = np.concatenate([values, new])
            stored += new.size * width
            assert client.engine.asked[-1].get("routed_experts_start_len", 0) == start_len
            assert rows_in(leaf["routed_experts"]).reshape(-1, 6).tolist() == values.tolist()
            assert (await client.stats())["token_rows"]["routed_experts"]["bytes"] == stored
            tokens = [*leaf["tokens"], 9]


async def test_pitfall_28_memory_for_experts_is_limited_and_drops_are_told(
    start: Start, model: NgramModel, checkpoint: str
) -> None:
    async with telling(start, checkpoint, model, "--r3-shape", "3", "2", "--r3-max-bytes", "300") as (
        client,
        _,
    ):
        for number, width in enumerate((1, 1, 2, 4)):
            values = np.full((9, 6), (1 << 8 * width) // 2 - 1)
            leaf = await turn(client, 10, {"routed_experts": base64_of(values)}, f"s{number}")
            assert leaf["experts_exact"]
            stats = (await client.stats())["token_rows"]["routed_experts"]
            assert stats["bytes"] <= 300
        told = [(await leaf_of(client, f"s{number}"))["routed_experts_reason"] for number in range(4)]
        assert (told, stats["dropped"]) == (["dropped", "dropped", "dropped", None], 3)
