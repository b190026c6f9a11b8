"""``[TOOL_CALLS]``: Mistral's two formats.

Tokenizer v3 has ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`` (mistralai/Mistral-7B-Instruct-v0.3). Later
versions have ``[TOOL_CALLS]name[ARGS]{...}``, with the tag before each call (Magistral, Devstral, Ministral 3). Some of
these have ``[CALL_ID]id`` between name and arguments (Mistral-Small-3.2). Sources: the chat templates of these models.
"""

from __future__ import annotations

import string
import time
from itertools import count

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import SPACE, Reading, Source
from slime_openai.parsing.tool_calls.calls import NAME, arguments, call_array, read_tagged, settle

__all__ = ["new_id", "read"]

_START = "[TOOL_CALLS]"
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
#: Numbers for the ids, below 62**9. The first number comes from the clock, in nanoseconds, so another process begins
#: with another number.
_NUMBERS = count(time.time_ns() % (62**9 // 2))


def new_id() -> str:
    """Return nine letters and digits: the templates refuse any other id. Later ids sort after earlier ones."""
    number = next(_NUMBERS)
    return "".join(_ALPHABET[number // 62**place % 62] for place in reversed(range(9)))


def read(source: Source, writer: Writer) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(source, writer, (_START,), _calls)


def _calls(source: Source, writer: Writer, tag: str) -> Reading[None]:
    yield from source.run(SPACE)
    if (yield from source.peek()) == "[":
        yield from call_array(source, writer)
        return
    name = yield from source.run(NAME)
    if (yield from source.expect("[ARGS]", "[CALL_ID]")) == "[CALL_ID]":
        yield from source.run(NAME)
        yield from source.expect("[ARGS]")
    yield from source.run(SPACE)
    settle(source, writer, (yield from arguments(source, writer, name, _START)))
