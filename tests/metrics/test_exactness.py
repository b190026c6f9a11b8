"""Exactness of generations and chats, at ``/metrics``."""

from __future__ import annotations

import pytest

from metrics.scrapes import Numbers, scraped
from openai_.chat.scripted import scripted
from routers import Start

pytestmark = pytest.mark.anyio

EXACT = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache", "--plugin", "openai")
BODY = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2, "ignore_eos": True}
META = {"finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 99, "completion_tokens": 1}


def of(found: Numbers, name: str) -> dict[str, float]:
    """The numbers of the metric by its labels."""
    return {labels: number for (metric, labels), number in found.items() if metric == name}


@pytest.mark.parametrize("stream", [False, True])
async def test_generations_and_chats_count_by_path_and_reason(start: Start, stream: bool) -> None:
    async with start(*EXACT) as running:
        for path, body in (("/generate", BODY), ("/generate", BODY), ("/v1/chat/completions", CHAT)):
            answer = await running.client.post(path, json={**body, "stream": stream})
            assert answer.status_code == 200
        await running.client.post("/generate", json={"text": 7})
        found = of(await scraped(running.client), "slime_generations_total")
    assert found == {"path=/generate reason=exact": 2, "path=/v1/chat/completions reason=exact": 2}


async def test_inexact_generations_count_under_their_reason(start: Start) -> None:
    wrong = {"text": "a", "output_ids": [1], "meta_info": META}
    async with scripted(start, wrong, wrong) as (running, engine):
        await running.client.post("/generate", json={"text": "Hello"})
        await running.client.post("/v1/chat/completions", json=CHAT | {"n": 1})
        engine.script.append({"text": "a", "meta_info": {}})
        await running.client.post("/generate", json={"text": "Hello"})
        engine.script.append((400, b'{"error":{"message":"no"}}'))
        await running.client.post("/generate", json={"text": "Hello"})
        found = of(await scraped(running.client), "slime_generations_total")
    assert found == {
        "path=/generate reason=engine_contradicts_itself": 1,
        "path=/v1/chat/completions reason=engine_contradicts_itself": 1,
        "path=/generate reason=not_recorded": 1,
    }


async def test_sampling_parameter_in_the_wrong_place_is_told_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(*EXACT) as running:
        for _ in range(2):
            await running.client.post("/generate", json={**BODY, "max_new_tokens": 4})
    (line,) = [message for message in caplog.messages if "max_new_tokens" in message]
    assert line.startswith(
        "a request has the unknown field 'max_new_tokens': the answer is recorded as not exact"
    )
    assert line.endswith("engines ignore it outside of sampling_params")


async def test_names_that_clients_choose_add_no_series(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(*EXACT) as running:
        for number in range(20):
            answer = await running.client.post("/generate", json={**BODY, f"field_{number}": 1})
            assert answer.status_code == 200
        found = of(await scraped(running.client), "slime_generations_total")
    assert found == {"path=/generate reason=unknown_field": 20}
    assert sum("unknown field" in message for message in caplog.messages) == 16
