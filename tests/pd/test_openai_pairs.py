"""OpenAI's paths through pairs of embedded engines, by the plugin openai and by the engines themselves."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pytest

from pd.halves import Pairs, disaggregated
from routers import Start
from slime_engine.model import NgramModel
from slime_engine.moe import routed_experts
from slime_engine.settings import Settings

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story."}], "logprobs": True},
    COMPLETIONS: {"prompt": "Once upon a time", "logprobs": 1},
}
MOE: dict[str, Any] = {"moe_layers": 3, "moe_experts": 8, "moe_topk": 2}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 8}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
]


@dataclass(frozen=True)
class Entry:
    """The journal entry of a decode engine, which agrees with that of a prefill engine."""

    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]


def entry(pairs: Pairs) -> Entry:
    """Return the only generation so far, by the journals of both engines."""
    (read,) = [each for half in pairs.prefills for each in half.journal()]
    (written,) = [each for half in pairs.decodes for each in half.journal()]
    assert read["input_ids"] == written["input_ids"]
    assert read["output_ids"] == written["output_ids"][:1]
    assert read["output_logprobs"] == written["output_logprobs"][:1]
    return Entry(written["input_ids"], written["output_ids"], written["output_logprobs"])


async def choices(pairs: Pairs, path: str, stream: bool, **body: Any) -> list[dict[str, Any]]:
    """Return the choice of a whole answer, or those of all chunks."""
    body = {"model": "m", "max_tokens": 12, "ignore_eos": True, **ASKED[path], "stream": stream, **body}
    answer = await pairs.running.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return list(answer.json()["choices"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [choice for line in lines for choice in orjson.loads(line)["choices"]]


def logprobs(found: list[dict[str, Any]]) -> list[float]:
    told = [each["logprobs"] for each in found if each.get("logprobs")]
    return [
        value
        for each in told
        for value in (each.get("token_logprobs") or [one["logprob"] for one in each["content"]])
    ]


def text(found: list[dict[str, Any]]) -> str:
    pieces = [
        each.get("text") or (each.get("message") or each.get("delta") or {}).get("content") for each in found
    ]
    return "".join(piece or "" for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_plugin_answers_with_the_exact_tokens_of_both_engines(
    start: Start, model: NgramModel, checkpoint: str, path: str, stream: bool
) -> None:
    flags = ("--plugin", "radix_cache", "--plugin", "openai", "--plugin", "r3", "--hf-checkpoint", checkpoint)
    async with disaggregated(start, model, *flags, prefills=2, decodes=2, **MOE) as pairs:
        asked = {"return_token_ids": True, "return_routed_experts": True, "session_id": "s"}
        found = await choices(pairs, path, stream, **asked)
        written = entry(pairs)
        assert [token for each in found for token in each.get("token_ids") or ()] == written.output_ids
        assert logprobs(found) == written.output_logprobs
        sequence = written.input_ids + written.output_ids
        (experts,) = [each["routed_experts"] for each in found if each.get("routed_experts")]
        told = np.frombuffer(base64.b64decode(experts), "<i4")
        assert told.tolist() == routed_experts(sequence, 0, Settings(**MOE)).ravel().tolist()
        (record,) = (await pairs.running.client.get("/trajectories/s")).json()["trajectories"]
        assert record["exact"], record
        assert record["tokens"] == sequence
        assert record["rollout_logp"][-len(written.output_ids) :] == written.output_logprobs
        assert record["loss_mask"] == [0] * len(written.input_ids) + [1] * len(written.output_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_tool_call_is_made_by_both_engines(
    start: Start, model: NgramModel, checkpoint: str, stream: bool
) -> None:
    flags = ("--plugin", "radix_cache", "--plugin", "openai", "--hf-checkpoint", checkpoint)
    async with disaggregated(start, model, *flags) as pairs:
        asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "ignore_eos": False}
        found = await choices(pairs, CHAT, stream, session_id="s", return_token_ids=True, **asked)
        written = entry(pairs)
        assert [token for each in found for token in each.get("token_ids") or ()] == written.output_ids
        calls: dict[int, str] = {}
        for each in found:
            for number, call in enumerate((each.get("message") or each["delta"]).get("tool_calls") or ()):
                place = call.get("index", number)
                calls[place] = calls.get(place, "") + (call["function"].get("arguments") or "")
        assert calls
        assert all([*orjson.loads(arguments)] == ["place"] for arguments in calls.values())
        assert found[-1]["finish_reason"] == "tool_calls"
        (record,) = (await pairs.running.client.get("/trajectories/s")).json()["trajectories"]
        assert record["exact"], record
        assert record["tokens"] == written.input_ids + written.output_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_engines_answer_themselves_without_the_plugin(
    start: Start, model: NgramModel, path: str, stream: bool
) -> None:
    async with disaggregated(start, model, prefills=2, decodes=2) as pairs:
        found = await choices(pairs, path, stream)
        written = entry(pairs)
        assert logprobs(found) == written.output_logprobs
        assert text(found) == model.tokenizer.decode(written.output_ids, skip_special_tokens=True)
        assert found[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_force_a_call_without_the_plugin(start: Start, model: NgramModel, stream: bool) -> None:
    async with disaggregated(start, model) as pairs:
        asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "ignore_eos": False}
        found = await choices(pairs, CHAT, stream, **asked)
        assert {call["name"] for call in orjson.loads(text(found))} == {"weather"}
        assert logprobs(found) == entry(pairs).output_logprobs
