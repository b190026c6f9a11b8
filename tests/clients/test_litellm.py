"""litellm, which has its own classes for everything."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("litellm", reason="litellm is not installed")

import litellm

from clients.rolling import ANSWERS, LAST_WORDS, QUESTION, SYSTEM, TOOLS, Rollout, call

pytestmark = [
    pytest.mark.anyio,
    # It keeps its connections, and logs behind its callers' backs.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:coroutine 'Logging.async_success_handler' was never awaited"),
]


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


def options(rollout: Rollout) -> dict[str, Any]:
    return {
        "model": "openai/policy",
        "tools": TOOLS,
        "api_base": rollout.base_url,
        "api_key": "none",
        "extra_headers": rollout.headers,
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_with_tools(rollout: Rollout, stream: bool) -> None:
    messages = asked()
    for _ in ANSWERS:
        answer: Any = litellm.completion(messages=messages, stream=stream, **options(rollout))
        if stream:
            answer = litellm.stream_chunk_builder([*answer], messages=messages)
        message = answer.choices[0].message
        messages += [message, *results(message)]
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


async def test_an_async_conversation(rollout: Rollout) -> None:
    messages = asked()
    for _ in ANSWERS:
        answer: Any = await litellm.acompletion(messages=messages, **options(rollout))
        message = answer.choices[0].message
        messages += [message, *results(message)]
    assert messages[-1].content == LAST_WORDS
    rollout.judge(turns=3)


def test_errors_are_of_its_classes(rollout: Rollout) -> None:
    with pytest.raises(litellm.BadRequestError, match="'temperature'"):
        litellm.completion(messages=asked(), temperature=9, **options(rollout))
    assert rollout.engine.journal() == []
