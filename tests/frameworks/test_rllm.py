"""rllm's gateway before a router: the traces that it makes of answers are what the engine's journal says."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from frameworks.gateway import (
    CHAT,
    COMPLETIONS,
    Gateway,
    Message,
    assert_told_once,
    logprobs_of,
    prompt_of,
)
from openai_.chat.chatting import chatting
from openai_.chat.scripted import scripted
from openai_.chat_models.families import QWEN2_5, QWEN3
from openai_.drift.rollouts import TOOLS
from slime_engine.moe import routed_experts

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
#: Modes of the engine's streams.
INCREMENTAL = pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
#: Half characters, thoughts, a call: text that has to wait.
SAID = (
    "<think>\nA “plan” ☔.\n</think>\n\nWell, 日本語 😀.",
    '<think>\nCall it.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>',
    "<think>\n\n</think>\n\nSTOP or not? It rains.",
)


@INCREMENTAL
@STREAMED
async def test_traces_of_a_rollout_are_what_the_engine_did(
    start: Start, streamed: bool, incremental: bool
) -> None:
    async with chatting(start, *SAID, incremental_streaming_output=incremental) as chat:
        gateway = Gateway(chat, streamed)
        messages: list[Message] = [{"role": "user", "content": "What now?"}]
        asked: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"stop": ["STOPPED"], "tools": TOOLS}]
        for turn, more in enumerate(asked):
            trace = await gateway.ask(messages, **more)
            entry = chat.entries[-1]
            assert len(chat.entries) == turn + 1
            assert trace.prompt == list(entry.input_ids)
            assert trace.sampled == list(entry.output_ids)
            assert trace.logprobs == list(entry.output_logprobs)
            if streamed:
                assert_told_once(gateway.chunks)
            messages += [
                {"role": "assistant", "content": trace.text},
                {"role": "user", "content": "And then?"},
            ]
    assert [trace.reason for trace in gateway.traces] == ["stop", "tool_calls", "stop"]
    assert gateway.traces[-1].text == "STOP or not? It rains."


@INCREMENTAL
@STREAMED
async def test_cumulative_turns_are_one_sequence_of_tokens(
    start: Start, streamed: bool, incremental: bool
) -> None:
    """Each prompt begins with all tokens before it. What only chats know goes along, and is no reason to refuse."""
    said = ("One 日本語.", "Two 😀.", "Three.")
    async with chatting(start, *said, family=QWEN2_5, incremental_streaming_output=incremental) as chat:
        gateway = Gateway(chat, streamed, cumulative=True)
        messages: list[Message] = [{"role": "user", "content": "Count."}]
        known: list[int] = []
        for turn, text in enumerate(said):
            new = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
            trace = await gateway.ask(messages, new, parallel_tool_calls=True, chat_template_kwargs={"x": 1})
            entry = chat.entries[turn]
            assert trace.prompt == list(entry.input_ids)
            assert trace.prompt[: len(known)] == known
            assert (trace.sampled, trace.logprobs) == (list(entry.output_ids), list(entry.output_logprobs))
            assert (trace.text, trace.reason) == (text, "stop")
            if streamed:
                assert_told_once(gateway.chunks)
            known = trace.tokens
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]


@INCREMENTAL
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_samples_of_a_prompt_are_told_apart(start: Start, path: str, incremental: bool) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if path == COMPLETIONS:
        prompt = {"prompt": QWEN2_5.tokenizer.encode("Hi")}
    said = tuple(f"Number {number}, 日本語." for number in range(8))
    async with chatting(start, said, family=QWEN2_5, incremental_streaming_output=incremental) as chat:
        chunks = await chat.streamed(path, **prompt, n=3, return_token_ids=True, max_tokens=60)
        entries = [(list(entry.input_ids), list(entry.output_ids)) for entry in chat.entries]
    told = []
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        told.append([token for choice in own for token in choice.get("token_ids", ())])
        prompts = [choice["prompt_token_ids"] for choice in own if "prompt_token_ids" in choice]
        assert prompts == ([entries[0][0]] if path == COMPLETIONS else [])
    assert [prompt_of(chunk) for chunk in chunks if "prompt_token_ids" in chunk] == (
        [entries[0][0]] if path == CHAT else []
    )
    assert sorted(told) == sorted(sampled for _, sampled in entries)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_prompt_alone_may_be_asked_for(start: Start, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    async with chatting(start, "One two three.", family=QWEN2_5) as chat:
        body = {**prompt, "return_prompt_token_ids": True, "max_tokens": 20}
        whole = await chat.post(path, **body)
        first, *others = await chat.streamed(path, **body)
        consumed = chat.consumed[0]
    assert prompt_of(whole) == prompt_of(first) == consumed
    assert not any(prompt_of(chunk) for chunk in others)
    for document in (whole, first, *others):
        assert "token_ids" not in document["choices"][0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_that_waits_does_not_hold_back_its_tokens(start: Start, path: str) -> None:
    """A possible stop string waits, and half a character has no text yet; their ids are sent at once."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    events = []
    for text, count, reason in (
        ("a", 1, None),
        ("aST", 3, None),
        ("aST", 4, None),
        ("aSTé", 5, None),
        ("aSTé", 6, {"type": "stop"}),
    ):
        ids = [97, 83, 84, 195, 169, 0][:count]
        triples = [[-token / 100, token, None] for token in ids]
        meta = {"completion_tokens": count, "output_token_logprobs": triples, "finish_reason": reason}
        events.append({"text": text, "output_ids": ids, "meta_info": meta})
    body = {**prompt, "stop": ["STOP"], "return_token_ids": True, "stream": True}
    async with scripted(start, events) as (running, _):
        answer = await running.client.post(path, json=body)
    chunks = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told: list[tuple[str, list[int]]] = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        if text or "token_ids" in choice:
            told.append((text, choice.get("token_ids", [])))
    assert told == [("a", [97]), ("", [83, 84]), ("", [195]), ("STé", [169]), ("", [0])]
    assert [logprobs_of(chunk["choices"][0]) for chunk in chunks if "token_ids" in chunk["choices"][0]] == [
        [-token / 100 for token in ids] for _, ids in told
    ]


@STREAMED
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_token_has_its_routing_matrix(start: Start, path: str, streamed: bool) -> None:
    """The experts that computed it are those of the token before it."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    async with chatting(start, "One two.", family=QWEN2_5, moe_layers=2, moe_topk=2) as chat:
        body: dict[str, Any] = {**prompt, "return_token_ids": True, "return_routed_experts": True}
        await chat.post(path, **body, max_tokens=1)
        for left_out in (0, 1, None):
            body["routed_experts_start_len"] = len(chat.consumed[0]) if left_out is None else left_out
            choices = (await chat.post(path, **body))["choices"]
            if streamed:
                choices = [
                    choice for chunk in await chat.streamed(path, **body) for choice in chunk["choices"]
                ]
            entry = chat.entries[-1]
            matrices = [each for choice in choices for each in choice.get("routing_matrices") or ()]
            assert len(matrices) == len(entry.output_ids)
            ids = [*entry.input_ids, *entry.output_ids]
            rows = routed_experts(ids, len(entry.input_ids) - 1, chat.engine.host.settings).tolist()
            if left_out is None:  # the row of the prompt's last token is not among those that were asked for
                assert matrices.pop(0) == ""
                del rows[0]
            read = [np.frombuffer(base64.b64decode(matrix), "<i4").reshape(2, 2) for matrix in matrices]
            assert [each.tolist() for each in read] == rows


@STREAMED
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("version", "told"), [("7", 7), ("default", None), ("step-7", None)])
async def test_the_weights_are_a_number_or_left_out(
    start: Start, path: str, streamed: bool, version: str, told: int | None
) -> None:
    """The gateway reads it with ``int()``, which would fail for any other name; the choice tells every name."""
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    async with chatting(start, "One.", family=QWEN2_5, weight_version=version) as chat:
        body = {**prompt, "return_token_ids": True, "max_tokens": 20}
        documents = await chat.streamed(path, **body) if streamed else [await chat.post(path, **body)]
        without = await chat.post(path, **prompt, max_tokens=20)
    versions = [document["weight_version"] for document in documents if "weight_version" in document]
    assert [int(each) for each in versions] == ([] if told is None else [told])
    assert documents[-1]["choices"][0]["weight_version"] == version
    assert "weight_version" not in without


async def test_tokens_may_be_named_by_their_ids(start: Start) -> None:
    async with chatting(start, "<think>\nhm\n</think>\n\nOne 😀.", family=QWEN3) as chat:
        body: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 60}
        question = [{"role": "user", "content": "Hi"}]
        document = await chat.post(messages=question, logprobs=True, top_logprobs=1, **body)
        legacy = await chat.post(COMPLETIONS, prompt="Hi", logprobs=1, **body)
        names = [[f"token_id:{token}" for token in sampled] for sampled in chat.sampled]
    content = document["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names[0]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)
    told = legacy["choices"][0]["logprobs"]
    assert told["tokens"] == names[1]
    assert all(name.startswith("token_id:") for each in told["top_logprobs"] for name in each)
    assert told["text_offset"][0] == 0
    assert told["text_offset"][-1] < len(legacy["choices"][0]["text"]) + len("<|im_end|>")
