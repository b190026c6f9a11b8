"""Chats with an engine that aborts in SGLang's shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from aborting_engine import AbortingEngine, Shape
from openai_.chat_models.families import QWEN3_PLAIN
from slime_http.serving import serving

TOKENIZER = QWEN3_PLAIN.tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start
    from slime_testing import Running


PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
TAPE = [
    token
    for word in ("one", " two", " three", " four", " five", " six")
    for token in TOKENIZER.encode(word)[:1]
]
MESSAGES = [{"role": "user", "content": "hello"}]
ALL = TOKENIZER.decode(TAPE)


@asynccontextmanager
async def aborting(
    start: Start, checkpoint: Path, engine: AbortingEngine, *flags: str
) -> AsyncIterator[Running]:
    TOKENIZER.save(checkpoint)
    async with (
        serving(engine.app) as url,
        start(
            *("--plugin", "radix_cache", "--hf-checkpoint", str(checkpoint), "--plugin", "openai"),
            *("--worker-urls", url, "--disable-health-check", "--abort-retry-wait-s", "0", *flags),
        ) as running,
    ):
        yield running


async def events_of(running: Running, path: str, session: str = "s", **body: Any) -> list[dict[str, Any]]:
    headers = {"x-session-id": session}
    async with running.client.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


async def answer_of(running: Running, path: str, session: str = "s", **body: Any) -> Any:
    answer = await running.client.post(path, json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    return answer.json()


def begin_again(engine: AbortingEngine, *cuts: int | None) -> None:
    """Let ``engine`` forget all that it was asked, and take these ``cuts``."""
    for memory in (engine.asked, engine.consumed, engine.sampled):
        memory.clear()
    engine.cuts[:] = cuts


def engine_of(shape: Shape, mode: str, *cuts: int | None) -> AbortingEngine:
    return AbortingEngine(TOKENIZER, TAPE, cuts, shape, incremental=mode == "incremental")
