"""The engine's own OpenAI routes, so that a router has something to pass to."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.served import Serve, Served
from slime_engine.model import NgramModel
from slime_engine.moe import encode_experts, routed_experts

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Tell me a joke."}]
#: Nested deeper than orjson writes.
DEEP = {"items": orjson.loads(b"[" * 400 + b"]" * 400)}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def test_a_chat_is_rendered_generated_and_counted(engine: Served, model: NgramModel) -> None:
    body = {"messages": MESSAGES, "seed": 3, "max_tokens": 200, "rid": "chat", "model": "any"}
    answer = (await engine.post("/v1/chat/completions", **body)).json()
    (entry,) = await engine.journal("chat")
    prompt = model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert entry["input_ids"] == model.tokenizer.encode(prompt)
    assert (answer["object"], answer["model"], answer["id"]) == ("chat.completion", "any", "chat")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": entry["text"]}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": len(entry["input_ids"]),
        "completion_tokens": len(entry["output_ids"]),
        "total_tokens": len(entry["input_ids"]) + len(entry["output_ids"]),
    }


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_has_deltas_that_add_up(serve: Serve, incremental: bool, path: str) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "Once there was"}
    body = {**prompt, "max_completion_tokens": 60, "n": 2, "seed": 1}

    def text_of(choice: dict[str, Any]) -> str:
        return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])

    async with serve(incremental_streaming_output=incremental) as engine:
        whole = (await engine.post(path, **body)).json()
        chunks = [
            chunk async for chunk in engine.events(path, **body, stream_options={"include_usage": True})
        ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(map(text_of, parts)) == choice.get("text", choice.get("message", {}).get("content"))
        assert [part["finish_reason"] for part in parts][:-1] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if "delta" in parts[0]:
            assert parts[0]["delta"]["role"] == "assistant"


async def test_logprobs_come_with_their_tokens(engine: Served) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 5, "rid": "l"}
    answer = (await engine.post("/v1/chat/completions", **body)).json()
    (entry,) = await engine.journal("l")
    content = answer["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == entry["output_logprobs"]
    assert all(isinstance(one["token"], str) for one in content)


async def test_completions_take_text_ids_and_lists_of_either(engine: Served, model: NgramModel) -> None:
    ids = model.tokenizer.encode("Once")
    for prompt in ("Once", ids, ["Once", "There"], [ids, ids]):
        answer = (await engine.post("/v1/completions", prompt=prompt, max_tokens=3)).json()
        assert answer["object"] == "text_completion"
        assert len(answer["choices"]) == (2 if isinstance(prompt[0], list) or prompt[1:] == ["There"] else 1)
    inputs = [entry["input_ids"] for entry in (await engine.journal())[-6:]]
    assert inputs[:3] == [ids, ids, ids]
    assert inputs[4:] == [ids, ids]


async def test_usage_counts_each_prompt_of_a_batch_once(engine: Served, model: NgramModel) -> None:
    prompts = ["Once", "There was a king."]
    lengths = [len(model.tokenizer.encode(prompt)) for prompt in prompts]
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "ignore_eos": True}
    whole = (await engine.post("/v1/completions", **body)).json()
    options = {"include_usage": True}
    chunks = [chunk async for chunk in engine.events("/v1/completions", **body, stream_options=options)]
    expected = {"prompt_tokens": sum(lengths), "completion_tokens": 12, "total_tokens": sum(lengths) + 12}
    assert (whole["usage"], chunks[-1]["usage"]) == (expected, expected)


@pytest.mark.parametrize("incremental", [False, True])
async def test_chunk_has_the_logprobs_of_its_own_tokens(serve: Serve, incremental: bool) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 8, "n": 2, "ignore_eos": True}
    async with serve(incremental_streaming_output=incremental, tokens_per_second=200) as engine:
        chunks = [chunk async for chunk in engine.events("/v1/chat/completions", **body)]
        sampled = [entry["output_logprobs"] for entry in await engine.journal()]
    streamed: list[list[float]] = [[], []]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += [one["logprob"] for one in choice["logprobs"]["content"]]
    assert len(chunks) > 2
    assert streamed == sampled


async def test_models_are_listed(serve: Serve) -> None:
    async with serve(model_name="tiny") as engine:
        (only,) = (await engine.get("/v1/models"))["data"]
    assert only["id"] == "tiny"


async def test_a_chat_with_token_ids_tells_what_a_session_server_reads(
    serve: Serve, model: NgramModel
) -> None:
    ids = model.tokenizer.encode_plain("<|im_start|>user\nHi<|im_end|>")
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "input_ids": ids,
        "logprobs": True,
        "return_meta_info": True,
    }
    body |= {"return_routed_experts": True, "routed_experts_start_len": 2, "return_indexer_topk": True}
    body |= {"no_stop_trim": False, "max_tokens": 30, "n": 2, "seed": 3}
    async with serve(moe_layers=2) as engine:
        choices = (await engine.post("/v1/chat/completions", **body)).json()["choices"]
        entries = {entry["rid"]: entry for entry in await engine.journal()}
        settings = engine.host.settings
    for choice in choices:
        meta = choice["meta_info"]
        entry = entries.pop(meta["id"])
        assert entry["input_ids"] == ids
        assert [token for _, token, _ in meta["output_token_logprobs"]] == entry["output_ids"]
        assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == entry["output_logprobs"]
        assert all(isinstance(text, str) for _, _, text in meta["output_token_logprobs"])
        assert meta["completion_tokens"] == len(entry["output_ids"])
        assert meta["finish_reason"] == entry["finish_reason"]
        rows = routed_experts([*ids, *entry["output_ids"]], 2, settings)
        assert meta["routed_experts"] == encode_experts(rows)
        assert meta["routed_experts_start_len"] == 2
        assert "indexer_topk" not in meta, "as SGLang without an indexer"
        assert choice["message"]["content"] == entry["text"]
    assert not entries


async def test_content_is_empty_and_not_null(engine: Served, model: NgramModel) -> None:
    stop = [token for token in range(model.vocab_size) if token not in model.tokenizer.special_ids]
    body = {"messages": MESSAGES, "stop_token_ids": stop, "return_meta_info": True}
    (choice,) = (await engine.post("/v1/chat/completions", **body)).json()["choices"]
    assert choice["message"]["content"] == ""
    assert choice["meta_info"]["completion_tokens"] == 1
    assert "output_token_logprobs" not in choice["meta_info"], "they come with logprobs"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": ["hello"]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "regex": "a", "ebnf": "b"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_schema"}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "always"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required", "tools": [{}]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required", "tools": [tool([1])]}),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "tool_choice": "required", "tools": [tool({"$defs": [1]})]},
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required", "tools": [tool(DEEP)]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": json_schema(DEEP)}),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": 7}),
        ("/v1/chat/completions", {"input_ids": [1]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "input_ids": []}),
        ("/v1/chat/completions", {"messages": MESSAGES, "input_ids": "1"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "input_ids": [[1]]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "input_ids": [1 << 30]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "return_meta_info": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "lora_path": "adapter"}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": None}),
    ],
)
async def test_errors_are_flat_as_sglangs_are(engine: Served, path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = (await engine.post(path, 400, **body, stream=stream)).json()
        assert set(answer) == {"object", "message", "type", "param", "code"}
        assert (answer["object"], answer["code"]) == ("error", 400)
        assert answer["message"]


async def test_meta_info_is_not_streamed(engine: Served) -> None:
    """As in SGLang, whose words a session server may know."""
    body = {"messages": MESSAGES, "return_meta_info": True, "stream": True}
    answer = (await engine.post("/v1/chat/completions", 400, **body)).json()
    assert "return_meta_info is not supported with streaming" in answer["message"]


async def test_responses_are_refused_by_name(engine: Served) -> None:
    answer = await engine.client.post("/v1/responses", json={"model": "m", "input": "Hi"})
    assert answer.status_code == 501
    assert "/v1/responses" in answer.json()["message"]
