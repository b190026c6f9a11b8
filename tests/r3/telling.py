"""A router that records routed experts, before an engine that tells what a test wants."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from radix_cache.scripted import Client, ScriptedEngine, routed
from slime_engine.model import NgramModel

if TYPE_CHECKING:
    from routers import Start

__all__ = ["answer_of", "base64_of", "leaf_of", "telling", "turn", "zeros"]


@asynccontextmanager
async def telling(
    start: Start, checkpoint: str, model: NgramModel, *flags: str
) -> AsyncIterator[tuple[Client, ScriptedEngine]]:
    engine = ScriptedEngine(model.tokenizer)
    async with routed(start, engine, checkpoint, "--plugin", "r3", *flags) as client:
        yield client, engine


def base64_of(values: npt.ArrayLike) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def zeros(values: int) -> str:
    return base64_of([0] * values)


def answer_of(
    client: Client, ids: list[int], prompt: int, reason: dict[str, Any], meta: dict[str, Any]
) -> bytes:
    """An engine's answer with the sampled ``ids``, after ``prompt`` tokens."""
    shown = ids[:-1] if reason["type"] == "stop" else ids
    figures = {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids),
        "finish_reason": reason,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": "1",
    }
    text = client.engine.tokenizer.decode(shown)
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": figures | meta})


async def turn(
    client: Client, tokens: int, meta: dict[str, Any], session: str, given: list[int] | None = None
) -> Any:
    """The record of a turn with ``tokens`` tokens, or with two after the ``given``, whose answer has ``meta``."""
    given = given if given is not None else list(range(5, 5 + tokens - 2))
    reason = {"type": "length", "length": 2}
    client.engine.script.append((200, answer_of(client, [6, 7], len(given), reason, meta)))
    body = {"input_ids": given, "session_id": session}
    answer = await client.running.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    leaf = await leaf_of(client, session)
    assert leaf["exact"], leaf["inexact_reason"]
    assert leaf["experts_exact"] is (leaf["routed_experts_reason"] is None)
    assert (leaf["routed_experts"] is None) is not leaf["experts_exact"]
    return leaf


async def leaf_of(client: Client, session: str) -> Any:
    path = f"/trajectories/{session}?return_routed_experts=true"
    (leaf,) = (await client.running.client.get(path)).json()["trajectories"]
    return leaf
