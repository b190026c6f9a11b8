"""Requests and answers that are read in pieces: the tokens are those of the journal all the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.scripted import ScriptedEngine, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

_IDS = random.Random(1).choices(range(300, 1200), k=40_000)
_SAMPLED = random.Random(2).choices(range(300, 1200), k=5_000)


@pytest.mark.parametrize("kind", ["text", "ids", "chat", "completion of ids"])
async def test_a_large_conversation_is_exact(
    start: Start, engine: ScriptedEngine, checkpoint: str, kind: str
) -> None:
    """A prompt of 170 kB or more, 5,000 tokens sampled, and a second turn that goes on from both."""
    decode = engine.tokenizer.decode
    text = decode(_IDS, skip_special_tokens=False)
    async with routed(start, engine, checkpoint, "--plugin", "openai") as client:
        for turn in range(2):
            path, body = _asked(kind, text, engine.consumed[-1] + _SAMPLED if turn else _IDS, decode, turn)
            engine.script.append(_SAMPLED)
            answer = await client.running.client.post(path, json={**body, "session_id": "s"}, timeout=60)
            assert answer.status_code == 200, answer.text[:500]
            if "ids" in kind:
                assert engine.consumed[-1] == (engine.consumed[0] + _SAMPLED if turn else _IDS)
        first, second = engine.consumed
        assert second[: len(first) + len(_SAMPLED)] == first + _SAMPLED
        (record,) = await client.records("s")
        assert (record["exact"], record["inexact_reason"]) == (True, None)
        assert record["tokens"] == second + _SAMPLED
        assert record["loss_mask"][len(first) : len(first) + len(_SAMPLED)] == [1] * len(_SAMPLED)
        assert sum(record["loss_mask"]) == 2 * len(_SAMPLED)


def _asked(kind: str, text: str, ids: list[int], decode: Any, turn: int) -> tuple[str, dict[str, Any]]:
    said = decode(_SAMPLED, skip_special_tokens=True)
    whole = f"{text}{said}, and then?" if turn else text
    if kind == "chat":
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        messages = [{"role": "user", "content": text}, *(more if turn else ())]
        return "/v1/chat/completions", {"model": "m", "messages": messages}
    if kind == "completion of ids":
        return "/v1/completions", {"model": "m", "prompt": ids}
    return "/generate", {"text": whole} if kind == "text" else {"input_ids": ids}
