"""Values that a parameter may hold, and others: JSON of every kind, and the numbers beside every limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["MESSAGES", "VALUES"]


def _read(text: str) -> Iterator[Any]:
    """The JSON values in ``text``, which stand side by side."""
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:]


VALUES: list[Any] = [
    *_read(
        """
        null true false
        -9223372036854775809 -9223372036854775808 -2147483649 -2147483648 -101 -3 -2 -1 0 1 2 3 20 21 128 129
        2147483647 2147483648 9223372036854775807 9223372036854775808 -2.5 -0.5 1e-9 0.5 1.5 2.5
        "" "x" "auto" "none" "required" "default" "flex" "low" "medium" "extreme" "text" "24h"
        [] [0] [1, 2] [-1] [2147483648] [true] [1.5] [null] ["x"] [""] ["x", ""] ["x", 1] [1, "x"] ["text"]
        ["text", "audio"] [[]] [[1]] [[1], []] [[1], "x"] [["x"]] [{}]
        {} {"x": 1} {"x": null} {"5": 1} {"5": 100.5} {"5": "x"} {"5": null} {"-5": 1} {"٣": 1}
        {"include_usage": true} {"include_usage": null} {"include_usage": 1} {"include_obfuscation": true}
        {"include_obfuscation": false, "continuous_usage_stats": null} {"continuous_usage_stats": true}
        {"type": "text"} {"type": "json_object"} {"type": "json_schema"} {"type": "x"} {"type": null}
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
        {"type": "json_schema", "json_schema": {"name": "x", "schema": null}}
        {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}
        {"type": "json_schema", "json_schema": {"schema": {}}}
        {"type": "function", "function": {"name": "find"}}
        {"type": "function", "function": {"name": 1}}
        {"type": "function", "function": null}
        {"type": "custom", "custom": {"name": "find"}}
        {"enable_thinking": false} {"add_generation_prompt": true} {"chat_template": "x"} {"documents": []}
        {"continue_final_message": true} {"conversation": []} {"max_length": 1} {"messages": []} {"padding": true}
        {"return_assistant_tokens_mask": true} {"return_dict": true} {"return_tensors": "pt"} {"self": 1}
        {"tokenize": true} {"tokenizer_kwargs": {}} {"tools": []} {"truncation": true}
        [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
        [{"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "b"}}]
        [{"type": "function", "cache_control": {}, "function": {"name": "a", "strict": true, "parameters": null}}]
        [{"type": "function", "function": {"name": "a", "parameters": []}}]
        [{"type": "function", "function": {"name": ""}}] [{"type": "function", "function": {"name": "a b"}}]
        [{"type": "function", "function": {"name": "é"}}] [{"type": "function", "function": {"name": null}}]
        [{"type": "function"}] [{"type": "custom", "custom": {"name": "a"}}] [{"function": {"name": "a"}}]
        """
    ),
    *([{"type": "function", "function": {"name": "a" * length}}] for length in (64, 65)),
]

_ROLES: list[Any] = [
    *_read('"assistant" "developer" "function" "system" "tool" "user" "critic" "" null 1 []')
]
_CONTENTS: list[Any] = [
    *_read(
        """
        null "" "Hi" 1 {} [] [1] ["Hi"]
        [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
        [{"type": "refusal", "refusal": "No."}]
        [{"type": "text"}] [{"type": "text", "text": null}] [{"type": "other", "text": "a"}] [{"text": "a"}]
        """
    )
]
_CALLS: list[Any] = [
    *_read(
        """
        null [] {} [{}] [null] [{"function": {"name": "f"}}] [{"function": {"arguments": ""}}]
        [{"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed": {}}}]
        [{"id": null, "function": {"name": "f", "arguments": "{"}}]
        [{"id": 1, "function": {"name": "f", "arguments": ""}}]
        [{"function": {"name": "f", "arguments": {"a": 1}}}] [{"function": {"name": "f", "arguments": []}}]
        [{"function": {"name": "f", "arguments": null}}] [{"function": {"name": "", "arguments": ""}}]
        [{"type": "custom", "function": {"name": "f", "arguments": ""}}]
        [{"type": null, "function": {"name": "f", "arguments": ""}}]
        """
    )
]
_KEYS = (
    *("annotations", "audio", "function_call", "name", "parsed", "provider_specific_fields"),
    *("reasoning", "reasoning_content", "tool_call_id", "tool_calls", "unheard_of"),
)
_MORE: list[Any] = [*_read('null "" "x" 1 {}')]

#: Whole conversations, for what stands in their messages.
MESSAGES: list[Any] = [
    *_read('null {} [] "Hi" [null] [[]] ["Hi"] [{"content": "Hi"}] [{"role": "user", "content": "Hi"}, 1]'),
    *([{"role": role}] for role in _ROLES),
    *([{"role": role, "content": content}] for role in _ROLES for content in _CONTENTS),
    *(
        [{"role": role, "content": "Hi", key: value}]
        for role in _ROLES[:6]
        for key in _KEYS
        for value in _MORE
    ),
    *([{"role": "assistant", "tool_calls": calls}] for calls in _CALLS),
    *([{"role": "assistant", "refusal": refusal}] for refusal in _MORE),
]
