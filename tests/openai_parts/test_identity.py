"""Conversations are one, whatever clients did to their messages."""

from __future__ import annotations

from typing import Any

from slime_openai.identity import beginning, next_key
from slime_openai.messages import Message, ToolCall, read_messages

START = beginning(None, {})
CALLED = Message(
    "assistant",
    tool_calls=(
        ToolCall("weather", '{"days":2,  "city": "Z\\u00fcrich"}', "call_1"),
        ToolCall("clock", "{}", "call_2"),
    ),
)
#: As smolagents has them: its objects, printed.
WRITTEN: list[Any] = [
    {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
    },
    {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": {}}},
]


def said(content: str) -> bytes:
    """The key of an assistant's message with this text."""
    (message,) = read_messages([{"role": "assistant", "content": [{"type": "text", "text": content}]}])
    return next_key(START, message)


def test_calls_may_be_written_into_the_text() -> None:
    called = next_key(START, CALLED)
    assert said(f"Calling tools:\n{WRITTEN}") == called
    assert said(f"\nCalling tools:\n{WRITTEN}\n") == called  # behind the empty content of a stream
    assert said(f"Calling tools:\n{WRITTEN[:1]}") != called
    assert said(f"Calling tools:\n{WRITTEN[::-1]}") != called
    assert said(f"No.\nCalling tools:\n{WRITTEN}") != called


def test_text_before_written_calls_is_content() -> None:
    message = Message("assistant", "Let me see.", CALLED.tool_calls)
    assert said(f"Let me see.\nCalling tools:\n{WRITTEN}") == next_key(START, message)


def test_what_is_no_list_of_calls_is_text() -> None:
    texts = [
        "Calling tools:\n",
        "Calling tools:\nnone",
        "Calling tools:\n[1]",
        "Calling tools:\n[{'function': {'name': 'f'}}]",
        "Calling tools:\n[{'function': {'name': 'f', 'arguments': {1, 2}}}]",
        "Calling tools:\n[__import__('os')]",
        "Calling tools:\n\0",
        "Calling tools:\n" + "[" * 5000,
    ]
    assert len({said(text) for text in texts} | {next_key(START, Message("assistant", ""))}) == len(texts) + 1
