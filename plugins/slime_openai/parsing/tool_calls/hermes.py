"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3, QwQ.

Each call stands between its own tags and newlines. Sources: the cards of NousResearch's Hermes-2-Pro models, whose
prompt has ``arguments`` before ``name``, and the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.
"""

from __future__ import annotations

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import SPACE, Reading, Source
from slime_openai.parsing.tool_calls.calls import call_object, read_tagged, settle

__all__ = ["read"]

_START, _END = "<tool_call>", "</tool_call>"


def read(source: Source, writer: Writer) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(source, writer, (_START,), _call)


def _call(source: Source, writer: Writer, tag: str) -> Reading[None]:
    yield from source.run(SPACE)
    known = yield from call_object(source, writer, _END)
    yield from source.attempt(source.spaced(_END))
    settle(source, writer, known)
