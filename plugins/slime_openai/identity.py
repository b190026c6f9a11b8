"""When two conversations are one, whatever clients did to their messages on the way.

Clients serialise arguments anew, drop thoughts and call ids, strip white space, turn content into parts and back.
None of that makes another conversation; another word does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from slime_openai.fields import encoded
from slime_openai.messages import Message, ToolCall

__all__ = ["Key", "beginning", "keys", "next_key"]

#: Of a conversation up to some message.
Key = bytes

_DIGEST_BYTES = 16
#: Roles that say the same under two names.
_ROLES = {"developer": "system", "function": "tool"}
_CALLS_FOLLOW = "Calling tools:\n"
#: Longer lists of calls are not read: no agent writes them, and it would take long.
_LONGEST_CALLS = 1 << 16
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


def beginning(tools: object, variables: Mapping[str, Any]) -> Key:
    """The key of a conversation before its first message: what else the template writes into it.

    Raises InvalidRequest for what is nested too deep to be written.
    """
    shown = {"tools": tools, "chat_template_kwargs": dict(variables)}
    written = [encoded(name, value, option=orjson.OPT_SORT_KEYS) for name, value in shown.items()]
    return _digest("".join(written).encode())


def keys(start: Key, messages: Iterable[Message]) -> list[Key]:
    """The key behind each of ``messages``. O(their text)."""
    found = []
    open_calls: list[str | None] = []
    for message in messages:
        call = 0
        if message.role == "assistant":
            open_calls = [each.id for each in message.tool_calls]
        elif message.tool_call_id in open_calls:
            call = open_calls.index(message.tool_call_id)
        if message.role in ("tool", "function") and open_calls:
            del open_calls[call]  # those without an id that is known are in the order of the calls
        start = next_key(start, message, call)
        found.append(start)
    return found


def next_key(key: Key, message: Message, call: int = 0) -> Key:
    """The key of the conversation ``key`` and ``message`` after it; ``call``: the place among open calls it answers."""
    content, tool_calls = message.content or "", message.tool_calls
    if message.role == "assistant":
        content = _THOUGHTS.sub("", content)
        if not tool_calls:
            content, tool_calls = _written_calls(content)
    calls = [(call.name, _canonical(call.arguments)) for call in tool_calls]
    role = _ROLES.get(message.role, message.role)
    name = message.name if role in ("system", "user") else None
    said = [role, content.strip(), calls, name, call]
    return _digest(key + orjson.dumps(said))


def _written_calls(content: str) -> tuple[str, tuple[ToolCall, ...]]:
    """``content`` without the calls that smolagents wrote into it, a list in Python's spelling; and these calls."""
    said, mark, written = content.rpartition(_CALLS_FOLLOW)
    written = written.strip()
    if not mark or len(written) > _LONGEST_CALLS or not (written.startswith("[") and written.endswith("]")):
        return content, ()
    try:
        listed = [each["function"] for each in ast.literal_eval(written)]
        functions = orjson.loads(orjson.dumps(listed))  # Python has names that JSON has not
        calls = [ToolCall(each["name"], orjson.dumps(each["arguments"]).decode()) for each in functions]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return content, ()  # it is no such list
    return said, tuple(calls)


def _canonical(arguments: str) -> str:
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # it reads four times as deep as it writes
        return arguments.strip()


def _digest(data: bytes) -> Key:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
