"""The SDK of OpenAI, in every way in which it can ask."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anyio
import pytest

pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

import openai
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel

from clients.rolling import (
    ANSWERS,
    FORCED_CALLS,
    LAST_WORDS,
    QUESTION,
    RESULTS,
    SYSTEM,
    TOOLS,
    Rolling,
    Rollout,
    call,
    weather,
)
from clients.schemas import bound_answers
from openai_.chat_models.families import QWEN2_5, Call, Words
from routers import answering
from slime_http.serving import serving
from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio


def asked() -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def results(message: Any) -> list[Any]:
    """The messages that answer the calls in ``message``."""
    return [
        {
            "role": "tool",
            "tool_call_id": each.id,
            "content": call(each.function.name, each.function.arguments),
        }
        for each in message.tool_calls or ()
    ]


def blocking(rollout: Rollout, **options: Any) -> OpenAI:
    return OpenAI(base_url=rollout.base_url, api_key="none", default_headers=rollout.headers, **options)


def test_a_conversation_with_tools(rollout: Rollout) -> None:
    messages = asked()
    origins = []
    with blocking(rollout) as client:
        for _ in ANSWERS:
            completion = client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, extra_body={"return_token_ids": True}
            )
            message = completion.choices[0].message
            messages += [message, *results(message)]  # the SDK's object, thoughts and all
            told = completion.to_dict()
            origins.append(told["history"])
            entry = rollout.engine.journal()[-1]
            assert told["prompt_token_ids"] == list(entry.input_ids)
            assert told["choices"][0]["token_ids"] == list(entry.output_ids)
            assert completion.model == "policy"
            assert completion.usage is not None
            assert completion.usage.completion_tokens == len(entry.output_ids)
    assert messages[-1].content == LAST_WORDS
    assert origins == ["fresh", "exact", "exact"]
    rollout.judge(turns=3)


async def test_conversations_of_an_async_client_at_the_same_time(rollout: Rollout) -> None:
    sessions = [rollout.session, "rollout-2", "rollout-3"]
    last_words: dict[str, str] = {}

    async def converse(client: AsyncOpenAI, session: str) -> None:
        messages = asked()
        for _ in ANSWERS:
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, extra_headers={"X-Session-Id": session}
            )
            message = completion.choices[0].message
            messages += [message, *results(message)]
        last_words[session] = messages[-1].content

    async with (
        AsyncOpenAI(base_url=rollout.base_url, api_key="none") as client,
        anyio.create_task_group() as tasks,
    ):
        for session in sessions:
            tasks.start_soon(converse, client, session)
    assert last_words == dict.fromkeys(sessions, LAST_WORDS)
    rollout.judge(*sessions[1:], turns=9, samples=3)


def test_streams(rollout: Rollout) -> None:
    messages = asked()
    with blocking(rollout) as client:
        for _ in ANSWERS:
            state: Any = ChatCompletionStreamState(input_tools=TOOLS)
            ids = set()
            for chunk in client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=TOOLS,
                stream=True,
                stream_options={"include_usage": True},
            ):
                ids.add(chunk.id)
                state.handle_chunk(chunk)
            completion = state.get_final_completion()
            message = completion.choices[0].message
            messages += [message, *results(message)]
            assert ids == {completion.id}
            assert completion.usage.completion_tokens == len(rollout.engine.journal()[-1].output_ids)
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


async def test_the_events_of_a_stream(rollout: Rollout) -> None:
    messages = asked()
    done: list[Any] = []
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key="none", default_headers=rollout.headers
    ) as client:
        for _ in ANSWERS:
            content = ""
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=TOOLS
            ) as stream:
                async for event in stream:
                    if event.type == "content.delta":
                        content += event.delta
                    elif event.type == "tool_calls.function.arguments.done":
                        done.append((event.name, event.parsed_arguments))
                message = (await stream.get_final_completion()).choices[0].message
            assert content == (message.content or "")
            messages += [message, *results(message)]
    assert done == [(each.name, json.loads(each.arguments)) for answer in ANSWERS for each in answer.calls]
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


class Weather(BaseModel):
    """The weather of the next days."""

    city: str
    days: int


class Trip(BaseModel):
    """A trip's destination."""

    destination: str
    umbrellas: int


def test_parsed_answers(rolling: Rolling) -> None:
    calls = tuple(Call("Weather", each.arguments) for each in ANSWERS[0].calls)
    rollout = rolling(
        Words(calls=calls[:1]),
        Words("One more.", calls=calls[1:]),
        Words('{ "destination" : "S\\u00e3o Paulo","umbrellas":2}'),
        family=QWEN2_5,
        results=RESULTS[:2],
    )
    messages = asked()
    tools = [pydantic_function_tool(Weather)]
    with blocking(rollout) as client:
        for _ in calls:
            message = (
                client.chat.completions.parse(model="policy", messages=messages, tools=tools)
                .choices[0]
                .message
            )
            [call] = message.tool_calls
            parsed = call.function.parsed_arguments
            assert isinstance(parsed, Weather)
            told = weather(parsed.city, parsed.days)
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": told}]
        last = client.chat.completions.parse(
            model="policy",
            messages=messages,
            tools=tools,
            tool_choice="none",  # a format binds the whole answer
            response_format=Trip,
        )
    assert last.choices[0].message.parsed == Trip(destination="São Paulo", umbrellas=2)
    assert bound_answers(rollout) == 1
    rollout.judge(turns=3)


def test_forced_calls(rolling: Rolling) -> None:
    rollout = rolling(*FORCED_CALLS, Words(LAST_WORDS), family=QWEN2_5, results=RESULTS)
    messages = asked()
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "clock"}}, "auto"]
    with blocking(rollout) as client:
        for choice in choices:
            completion = client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, tool_choice=choice
            )
            message = completion.choices[0].message
            messages += [message, *results(message)]
    assert messages[-1].content == LAST_WORDS
    assert bound_answers(rollout) == 2
    rollout.judge(turns=3)


def test_raw_responses(rollout: Rollout) -> None:
    messages = asked()
    with blocking(rollout) as client:
        for _ in ANSWERS:
            raw = client.chat.completions.with_raw_response.create(
                model="policy", messages=messages, tools=TOOLS
            )
            names = [name for name, _ in raw.headers.multi_items()]
            assert len(names) == len(set(names))
            assert raw.headers["content-type"] == "application/json"
            message = raw.parse().choices[0].message
            messages += [message, *results(message)]
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


def test_samples_of_one_prompt(rolling: Rolling) -> None:
    rollout = rolling(Words("Blue.", "The sky."))
    with blocking(rollout) as client:
        completion = client.chat.completions.create(
            model="policy", messages=asked(), n=3, logprobs=True, top_logprobs=2
        )
    for choice, entry in zip(completion.choices, rollout.engine.journal(), strict=True):
        assert choice.message.content == "Blue."
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert [token.logprob for token in tokens] == list(entry.output_logprobs)
        assert {len(token.top_logprobs) for token in tokens} == {2}
    rollout.judge(turns=3, samples=3)


def test_completions_and_models(rolling: Rolling) -> None:
    rollout = rolling(Words(" there was a king."))
    with blocking(rollout) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        whole = client.completions.create(model=model.id, prompt="Once upon a time", logprobs=1)
        pieces = client.completions.create(model=model.id, prompt="Once upon a time", stream=True)
        streamed = "".join(piece.choices[0].text for piece in pieces)
    assert whole.choices[0].text == streamed == " there was a king."
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == list(rollout.engine.journal()[0].output_logprobs)
    rollout.judge(turns=2, samples=2)


def test_errors_are_of_the_classes_of_the_sdk(rollout: Rollout) -> None:
    with blocking(rollout, max_retries=0) as client:
        ask = partial(client.chat.completions.create, model="policy", messages=asked())
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(temperature=9)
        assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.BadRequestError) as refused:
            ask(store=True)
        assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")
        rollout.replace_engine(None)
        with pytest.raises(openai.InternalServerError) as nobody:
            ask()
        assert nobody.value.status_code == 503
    assert rollout.engine.journal() == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (422, "UnprocessableEntityError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refusal_by_an_engine_raises_the_class_of_its_status(
    rollout: Rollout, status: int, kind: str, stream: bool
) -> None:
    engine = FakeEngine()
    engine.rest = lambda _: (status, b'{"object": "error", "message": "too much"}')
    with (
        rollout.portal.wrap_async_context_manager(serving(engine.app)) as worker,
        blocking(rollout, max_retries=0) as client,
    ):
        rollout.replace_engine(worker)
        with pytest.raises(getattr(openai, kind), match="too much") as refused:
            client.chat.completions.create(model="policy", messages=asked(), stream=stream)
    assert refused.value.status_code == status


def test_a_stream_that_breaks_off_raises(rollout: Rollout) -> None:
    meta = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 40, None]], "finish_reason": None}
    begun = json.dumps({"text": "I", "output_ids": [40], "meta_info": meta}).encode()
    with (
        rollout.portal.wrap_async_context_manager(serving(answering(b"data: %b\n\n" % begun))) as worker,
        blocking(rollout, max_retries=0) as client,
    ):
        rollout.replace_engine(worker)
        chunks = client.chat.completions.create(model="policy", messages=asked(), stream=True)
        said = (chunk.choices[0].delta.content for chunk in chunks)
        assert [next(said), next(said)] == ["", "I"]
        with pytest.raises(openai.APIError, match="ended before its answer"):
            next(said)
