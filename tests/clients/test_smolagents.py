"""smolagents: it forces calls, and its history is text, calls and results too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("smolagents", reason="smolagents is not installed")
pytest.importorskip("openai", reason="the SDK of OpenAI is not installed")

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

from clients.rolling import FORCED_CALLS, LAST_WORDS, QUESTION, RESULTS, Rolling, Rollout, clock, weather
from clients.schemas import bound_answers
from openai_.chat_models.families import QWEN2_5, Words


@contextmanager
def policy(rollout: Rollout) -> Iterator[Any]:
    model = OpenAIServerModel(
        "policy",
        api_base=rollout.base_url,
        api_key="none",
        client_kwargs={"default_headers": rollout.headers},
    )
    with model.client:
        yield model


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_with_tools(rolling: Rolling, stream: bool) -> None:
    final = f'[{{"name":"final_answer","parameters":{{"answer":"{LAST_WORDS}"}}}}]'
    rollout = rolling(*FORCED_CALLS, Words(final), family=QWEN2_5, results=RESULTS)
    with policy(rollout) as model:
        agent = ToolCallingAgent(
            [tool(weather), tool(clock)], model, stream_outputs=stream, verbosity_level=0
        )
        assert agent.run(QUESTION) == LAST_WORDS
    assert bound_answers(rollout) == 3
    rollout.judge(turns=3)


def test_an_agent_that_writes_code(rolling: Rolling) -> None:
    """It sends answers back with more in them than the model said: what it changed is prompt, and exact."""
    rollout = rolling(
        Words(
            "Thought: look.\n<code>\n"
            'print(weather("Z\\u00fcrich", days=2))\nprint(weather(city="São Paulo",days=3))\n</code>'
        ),
        Words('Thought: late?\n<code>\nprint( clock("東京") )\n</code>'),
        Words(f'Thought: so.\n<code>\nfinal_answer("{LAST_WORDS}")\n</code>'),
        family=QWEN2_5,
        results=RESULTS,
    )
    with policy(rollout) as model:
        agent = CodeAgent([tool(weather), tool(clock)], model, verbosity_level=0)
        assert agent.run(QUESTION) == LAST_WORDS
    *_, last = rollout.engine.journal()
    *_, record = rollout.records()
    assert record["tokens"] == [*last.input_ids, *last.output_ids]
    assert all(result in record["text"] for result in RESULTS)
