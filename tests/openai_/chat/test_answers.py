"""Answers in OpenAI's words: whole, in streams, and when things go wrong."""

from __future__ import annotations

import base64
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import orjson
import pytest

from deadlines import HANG_S
from openai_.chat.chatting import chatting
from openai_.chat_models.families import LLAMA, QWEN2_5, QWEN3
from openai_.drift.rollouts import TOOLS
from slime_http.serving import serving
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 80}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich \\ud83d\\ude00"}}\n</tool_call>'


def folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Content, thoughts and calls of a stream, put together."""
    told: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                told[key] += delta.get(key) or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(told["tool_calls"]):
                    told["tool_calls"].append({"name": piece["function"]["name"], "arguments": ""})
                told["tool_calls"][piece["index"]]["arguments"] += piece["function"].get("arguments", "")
    return told


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """The same of a message."""
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": [call["function"] for call in message.get("tool_calls", ())],
    }


class TestWhole:
    async def test_an_answer_has_all_that_sdks_read(self, start: Start) -> None:
        async with chatting(start, "<think>\nhm\n</think>\n\nHello.") as chat:
            document = await chat.post(**HELLO, model="mine")
        assert document["id"].startswith("chatcmpl-")
        assert (document["object"], document["model"]) == ("chat.completion", "mine")
        (choice,) = document["choices"]
        assert choice["index"] == 0
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hello.",
            "refusal": None,
            "reasoning_content": "hm",
        }
        assert not {"prompt_token_ids", "history"} & document.keys()
        (sampled,) = chat.sampled
        used = document["usage"]
        assert used["prompt_tokens"] == len(chat.consumed[0])
        assert used["completion_tokens"] == len(sampled)
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        thought = used["completion_tokens_details"]["reasoning_tokens"]
        assert chat.read(sampled[:thought]).endswith("hm")

    async def test_logprobs_are_those_of_the_engine(self, start: Start) -> None:
        async with chatting(start, "Grüße 😀.", family=QWEN2_5) as chat:
            document = await chat.post(**HELLO, logprobs=True, top_logprobs=2)
            (entry,) = chat.entries
        content = document["choices"][0]["logprobs"]["content"]
        assert [one["logprob"] for one in content] == list(entry.output_logprobs)
        assert [one["token"] for one in content] == [chat.read([token]) for token in entry.output_ids]
        for one in content:
            assert len(one["top_logprobs"]) == 2
            assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]

    async def test_calls_end_with_their_own_reason(self, start: Start) -> None:
        async with chatting(start, CALL) as chat:
            (choice,) = (await chat.post(**HELLO, tools=TOOLS))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert orjson.loads(call["function"]["arguments"]) == {"place": "Zürich 😀"}

    async def test_a_call_that_is_none_is_content(self, start: Start) -> None:
        broken = '<tool_call>\n{"name": "weather", "arguments"'
        async with chatting(start, broken) as chat:
            (choice,) = (await chat.post(**HELLO, tools=TOOLS))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (broken, "stop")

    async def test_formats_of_special_tokens_are_seen(self, start: Start) -> None:
        called = '<|python_tag|>{"name": "time", "parameters": {"place": "Rio"}}'
        async with chatting(start, called, family=LLAMA) as chat:
            (choice,) = (await chat.post(**HELLO, tools=TOOLS))["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "time"

    async def test_routed_experts_come_with_exact_tokens(self, start: Start) -> None:
        async with chatting(start, "Hello.", family=QWEN2_5, moe_layers=2) as chat:
            asked = {**HELLO, "return_routed_experts": True, "return_token_ids": True}
            (choice,) = (await chat.post(**asked))["choices"]
            chunks = await chat.streamed(**asked)
            for last, sampled in zip((choice, chunks[-1]["choices"][0]), chat.sampled, strict=True):
                experts = np.frombuffer(base64.b64decode(last["routed_experts"]), np.int32)
                size = len(chat.consumed[0]) + len(sampled) - 1
                assert experts.reshape(size, 2, -1).shape[2] > 0


class TestStreams:
    @pytest.mark.parametrize("incremental", [False, True])
    async def test_a_stream_says_what_the_whole_answer_says(self, start: Start, incremental: bool) -> None:
        """Random texts of tags, calls good and bad, characters of several tokens and stop strings."""
        random = Random(incremental)
        pieces = (
            CALL,
            "<tool_call>",
            "</think>",
            "<think>\n",
            "é",
            "日本語 😀",
            "STO",
            " \n",
            "word",
            '{"name": ',
        )
        async with chatting(start, "x", family=QWEN3, incremental_streaming_output=incremental) as chat:
            for number in range(25):
                text = "".join(random.choices(pieces, k=random.randint(1, 6))) + "."
                chat.script[:] = [text]
                body = {**HELLO, "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 200}
                body |= {"stop": ["STOP"]} | ({"tools": TOOLS} if random.random() < 0.7 else {})
                (choice,) = (await chat.post(**body))["choices"]
                chunks = await chat.streamed(**body)
                assert folded(chunks) == flat(choice["message"]), text
                assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]

    async def test_the_pieces_are_as_sdks_want_them(self, start: Start) -> None:
        async with chatting(start, f"<think>\nhm\n</think>\n\nSo:\n{CALL}") as chat:
            chunks = await chat.streamed(
                **HELLO, tools=TOOLS, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1
            )
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        *told, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(chat.sampled[0])
        deltas = [choice["delta"] for chunk in told for choice in chunk["choices"]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        reasons = [choice["finish_reason"] for chunk in told for choice in chunk["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
        (first, *others) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert first["id"].startswith("call_")
        assert (first["type"], first["function"]["name"]) == ("function", "weather")
        assert all(piece["index"] == 0 and piece.keys() == {"index", "function"} for piece in others)
        content = [
            entry
            for chunk in told
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert [entry["logprob"] for entry in content] == list(chat.entries[0].output_logprobs)
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)

    async def test_each_piece_comes_when_the_engine_has_made_it(self, start: Start) -> None:
        """The engine makes 20 tokens a second: between the first chunk and the last lies more than a second."""
        async with chatting(start, "w " * 30, family=QWEN2_5, tokens_per_second=20) as chat:
            times = []
            async with chat.running.client.stream(
                "POST", "/v1/chat/completions", json={**HELLO, "max_tokens": 30, "stream": True}
            ) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        times.append(anyio.current_time())
        assert times[-1] - times[0] > 1
        assert len(times) > 20

    async def test_several_answers_are_told_apart(self, start: Start) -> None:
        async with chatting(start, "Hello.") as chat:
            chunks = await chat.streamed(**HELLO, n=3)
        for index in range(3):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert folded(own)["content"] == "Hello."
            assert own[0]["choices"][0]["delta"]["role"] == "assistant"


class TestAborts:
    async def test_an_abort_that_was_asked_for_is_told_in_words_that_clients_know(self, start: Start) -> None:
        async with chatting(start, "w " * 60, family=QWEN2_5, tokens_per_second=50) as chat:

            async def abort() -> None:
                await anyio.sleep(0.3)
                await chat.running.client.post("/abort_request", json={"rid": "mine"})

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort)
                (choice,) = (await chat.post(**HELLO, rid="mine"))["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["engine_finish_reason"]["type"] == "abort"

    async def test_a_client_that_hangs_up_stops_the_engine(self, start: Start) -> None:
        async with chatting(start, "w " * 2000, family=QWEN2_5, tokens_per_second=50) as chat:
            body = {**HELLO, "max_tokens": 2000, "stream": True}
            async with chat.running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
            with anyio.fail_after(HANG_S):
                while chat.entries[0].finish_reason is None:  # noqa: ASYNC110  # the engine's own journal
                    await anyio.sleep(0.02)
            assert chat.entries[0].finish_reason["type"] == "abort"
            assert not any(worker.in_flight for worker in chat.running.router.pool)


class TestErrors:
    async def test_an_engines_refusal_is_nested(self, start: Start) -> None:
        async with chatting(start, "Hello.", context_length=64) as chat:
            long: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 100}]}
            status, error = await chat.refused(**long)
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert error["message"]
            status, error = await chat.refused(**HELLO, temperature=5)
            assert (status, error["param"]) == (400, "temperature")
            status, error = await chat.refused("/v1/chat/completions", messages=[])
            assert (status, error["param"]) == (400, "messages")
            status, error = await chat.refused("/v1/nothing")
            assert (status, error["type"]) == (404, "not_found_error")

    async def test_refusal_by_the_template_is_a_client_error(self, start: Start) -> None:
        async with chatting(start, "Hello.", family=LLAMA) as chat:
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            two = {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "d"}]}
            status, error = await chat.refused(messages=[{"role": "user", "content": "a"}, two])
            assert (status, error["param"]) == (400, "messages")

    async def test_without_a_worker_it_is_503(self, start: Start) -> None:
        async with chatting(start, "Hello.") as chat:
            await chat.running.client.post("/remove_worker", params={"url": chat.engine.url})
            status, error = await chat.refused(**HELLO)
            assert (status, error["type"]) == (503, "server_error")

    async def test_a_stream_that_breaks_says_so_in_the_stream(self, start: Start) -> None:
        engine = FakeEngine()
        engine.events_sent = 1
        meta = {"finish_reason": None, "completion_tokens": 1}
        engine.script.append({"text": "He", "output_ids": [1], "meta_info": meta})
        async with chatting(start, "Hello.") as chat, serving(engine.app) as url:
            await chat.replace_engine(url)
            *_, last = await chat.streamed(**HELLO)
        assert last["error"]["type"] == "server_error"

    async def test_a_key_is_not_asked_for_and_reaches_the_worker(self, start: Start) -> None:
        engine = FakeEngine()
        engine.rest = lambda _: (401, b'{"error":{"message":"who are you?"}}')
        async with chatting(start, "Hello.") as chat, serving(engine.app) as url:
            await chat.replace_engine(url)
            headers = {"authorization": "Bearer sk-1"}
            answer = await chat.running.client.post("/v1/chat/completions", json=HELLO, headers=headers)
        keys = [headers.get("authorization") for headers in engine.headers]
        assert (answer.status_code, keys) == (401, ["Bearer sk-1"])
        assert answer.json()["error"]["type"] == "authentication_error"


class TestMedia:
    async def test_images_go_to_a_workers_own_route_untouched_and_are_marked(self, start: Start) -> None:
        engine = FakeEngine()
        async with chatting(start, "Hello.") as chat, serving(engine.app) as url:
            await chat.replace_engine(url)
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            body = orjson.dumps({"messages": [{"role": "user", "content": [image]}], "odd": 1})
            answer = await chat.running.client.post("/v1/chat/completions", content=body)
        assert answer.headers["x-slime-exact"] == "false"
        (sent,) = [call.body for call in engine.calls if call.path == "/v1/chat/completions"]
        assert sent.endswith(body[1:])  # behind the rid that control gave it


class TestModels:
    async def test_the_workers_models_are_listed(self, start: Start) -> None:
        async with chatting(start, "Hello.", model_name="org/some-model") as chat:
            client = chat.running.client
            listed = (await client.get("/v1/models")).json()
            assert listed["object"] == "list"
            (model,) = listed["data"]
            assert (model["id"], model["object"]) == ("org/some-model", "model")
            assert (await client.get("/v1/models/org/some-model")).json() == model
            answer = await client.get("/v1/models/other")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert (await chat.post(**HELLO))["model"] == "org/some-model"


class TestCompletions:
    async def test_a_text_goes_on_with_the_tokens_that_were_sampled(self, start: Start) -> None:
        async with chatting(start, "One.", "Two.") as chat:
            asked = {"max_tokens": 50, "return_token_ids": True, "session_id": "s"}
            (first,) = (await chat.post("/v1/completions", prompt="Count:", **asked))["choices"]
            text = f"Count:{first['text']} and"
            (second,) = (await chat.post("/v1/completions", prompt=text, **asked))["choices"]
            sampled = [token for token in first["token_ids"] if chat.read([token]) != "<|im_end|>"]
            known = first["prompt_token_ids"] + sampled
            assert second["prompt_token_ids"][: len(known)] == known
            assert second["exact"]
            assert chat.consumed[1] == second["prompt_token_ids"]

    async def test_every_form_of_prompt(self, start: Start) -> None:
        async with chatting(start, "Ok.") as chat:
            ids = chat.family.tokenizer.encode("abc")
            for prompt, count in (("abc", 1), (["abc", "d"], 2), (ids, 1), ([ids, ids[:1]], 2)):
                document = await chat.post("/v1/completions", prompt=prompt, n=2, max_tokens=20)
                assert [choice["index"] for choice in document["choices"]] == list(range(2 * count))
                assert {choice["text"] for choice in document["choices"]} == {"Ok."}
                chunks = await chat.streamed("/v1/completions", prompt=prompt, n=2, max_tokens=20)
                for index in range(2 * count):
                    own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
                    assert "".join(choice["text"] for choice in own) == "Ok."
                    assert own[-1]["finish_reason"] == "stop"

    async def test_cached_tokens_are_those_of_each_prompts_first_sample(self, start: Start) -> None:
        engine = FakeEngine()
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": 1}, "completion_tokens": 1}
        engine.rest = lambda _: [
            [{"text": "a", "output_ids": [1], "meta_info": meta | {"cached_tokens": cached}}]
            for cached in (3, 4, 2, 1)
        ]
        asked: dict[str, Any] = {"prompt": [[5] * 4, [6] * 4], "n": 2, "max_tokens": 1}
        async with chatting(start, "Hello.") as chat, serving(engine.app) as url:
            await chat.replace_engine(url)
            whole = await chat.post("/v1/completions", **asked)
            *_, last = await chat.streamed("/v1/completions", **asked, stream_options={"include_usage": True})
        assert whole["usage"] == last["usage"]
        told = whole["usage"]
        assert (told["prompt_tokens"], told["prompt_tokens_details"]) == (8, {"cached_tokens": 5})

    async def test_echo_and_logprobs(self, start: Start) -> None:
        async with chatting(start, " tail.") as chat:
            (choice,) = (
                await chat.post("/v1/completions", prompt="head", echo=True, logprobs=1, max_tokens=30)
            )["choices"]
            (entry,) = chat.entries
        assert choice["text"] == "head tail."
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == "head tail.<|im_end|>"
        assert told["token_logprobs"][len(entry.input_ids) :] == list(entry.output_logprobs)
        assert told["token_logprobs"][0] is None
        assert told["text_offset"][:2] == [0, len(told["tokens"][0])]

    async def test_a_stream_places_tokens_as_a_whole_answer_does(self, start: Start) -> None:
        asked: dict[str, Any] = {
            "prompt": ["Zürich", "b"], "n": 2, "temperature": 0, "max_tokens": 20, "stop": [" cdX", "😀!"],
        }  # fmt: skip
        forms: list[dict[str, Any]] = [
            {"logprobs": 1},
            {"logprobs": 1, "echo": True},
            {"return_token_ids": True, "echo": True},
        ]
        async with chatting(start, "ab cd ef 😀 gh") as chat:
            for form in forms:
                whole = (await chat.post("/v1/completions", **asked, **form))["choices"]
                told = [each["logprobs"] for each in whole]
                streamed: list[dict[str, Any]] = [
                    {"tokens": [], "token_logprobs": [], "text_offset": []} for _ in told
                ]
                for chunk in await chat.streamed("/v1/completions", **asked, **form):
                    (choice,) = chunk["choices"]
                    for name, entries in streamed[choice["index"]].items():
                        entries += choice["logprobs"][name]
                for own, other in zip(told, streamed, strict=True):
                    assert other == {name: own[name] for name in other}
                for text, own in zip((each["text"] for each in whole), told, strict=True):
                    for place, token in zip(own["text_offset"], own["tokens"], strict=True):
                        is_kept = "\ufffd" not in token and place < len(text)  # not half a character, no stop
                        assert not is_kept or token.startswith(text[place : place + len(token)])
        prompts = [len("Zürich")] * 2 + [len("b")] * 2
        assert [each["text_offset"][0] for each in told] == prompts  # the prompts' tokens are not told


class TestGrammars:
    async def test_a_model_that_thinks_may_do_so_before_its_answer_is_bound(self, start: Start) -> None:
        engine = FakeEngine()
        engine.rest = lambda _: (400, b'{"error":{"message":"no"}}')
        async with chatting(start, "Hello.") as chat, serving(engine.app) as url:
            await chat.replace_engine(url)
            bound: dict[str, Any] = {"response_format": {"type": "json_object"}}
            for body in (HELLO, HELLO | bound):
                await chat.refused(**body)
        assert [body.get("require_reasoning") for body in engine.asked] == [None, True]
