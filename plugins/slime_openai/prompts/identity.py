"""Keys of conversations. A key ignores what clients change in answers that they send back.

Clients serialise arguments again, drop thoughts and call ids, strip white space, or turn content into parts. Such
changes leave the key as it is, so conversations with the same key may have answers that differ in this way, see
Parents. A changed word in an answer changes the key. Messages that are no answers are compared as the template writes
them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

from slime_openai.prompts.template_traits import TemplateTraits
from slime_openai.requests.call_arguments import canonical, write
from slime_openai.requests.fields import encoded
from slime_openai.requests.messages import Message, ToolCall

__all__ = ["Key", "answers_of", "beginning", "keys", "next_key", "unreachable_key"]

#: The key of a conversation up to some message.
Key = bytes

_DIGEST_BYTES = 16
#: Roles that are second names of other roles.
_ROLES = {"developer": "system", "function": "tool"}
_CALLS_FOLLOW = "Calling tools:\n"
#: The longest list of calls that is read, in characters. To read a longer list would take long. No agent writes one.
_LONGEST_CALLS = 1 << 16
_THOUGHTS_END = "</think>"
_THOUGHTS = re.compile(rf"\A\s*<think>.*?{_THOUGHTS_END}", re.DOTALL)


def beginning(tools: Sequence[object] | None, variables: Mapping[str, Any]) -> Key:
    """Return the key before the first message. It depends on the ``tools`` and ``variables`` that the template gets.

    Raises InvalidRequest for values that are nested too deep.
    """
    return _beginning(tools, variables) if tools or variables else _beginning_of_none()


@lru_cache(1)
def _beginning_of_none() -> Key:
    return _beginning((), {})


def _beginning(tools: object, variables: Mapping[str, Any]) -> Key:
    shown = {"tools": tools, "chat_template_kwargs": dict(sorted(variables.items()))}
    written = [encoded(name, value) for name, value in shown.items()]
    return _digest("".join(written).encode())


def keys(known: Sequence[Key], messages: Sequence[Message], traits: TemplateTraits) -> list[Key]:
    """Return the key before the first of ``messages``, and the key behind each of them.

    ``known``: the first keys of the result, at least one. O(text of the messages behind the last known key).
    """
    found = [*known]
    key, count = found[-1], len(found) - 1
    open_calls: list[str | None] = []
    for index in range(_last_answer(messages, count), len(messages)):
        message = messages[index]
        call = 0
        if message.role == "assistant":
            open_calls = [each.id for each in message.tool_calls] if message.tool_calls else []
        elif open_calls:
            if message.tool_call_id in open_calls:
                call = open_calls.index(message.tool_call_id)
            if message.role in ("tool", "function"):
                # A result without a known id belongs to the first call that has no result yet.
                del open_calls[call]
        if index >= count:
            key = next_key(key, message, traits, call)
            found.append(key)
    return found


def _last_answer(messages: Sequence[Message], count: int) -> int:
    """Return the index of the last answer among the first ``count`` messages; ``count`` if there is none."""
    for index in range(count - 1, -1, -1):
        if messages[index].role == "assistant":
            return index
    return count


def next_key(key: Key, message: Message, traits: TemplateTraits, call: int = 0) -> Key:
    """Return the key behind ``message``. ``key``: the key of the messages before it.

    ``call``: for a result, the index of its call among the calls that have no result yet.
    """
    if message.role == "assistant":
        said = _answer(message)
    else:
        role = _ROLES.get(message.role, message.role)
        content = traits.content(role, message.content or "")
        if role != "tool":
            said = orjson.dumps([role, content, message.name])
        else:
            name = message.name if traits.shows_tool_name else None
            answered = message.tool_call_id if traits.shows_call_ids else call
            said = orjson.dumps([role, content, name, answered])
    digest = blake2b(key, digest_size=_DIGEST_BYTES)
    digest.update(said)  # joining both would copy a whole message
    return digest.digest()


def unreachable_key(place: Key) -> Key:
    """Return a key behind ``place`` that no conversation has, for an answer that no request may continue."""
    return _digest(place + b"unreachable")


def answers_of(messages: Iterable[Message], traits: TemplateTraits) -> bytes:
    """Return a digest of what assistants say in ``messages``; empty if no message is an assistant's.

    The digest is for answers that no engine is known to have given. So it ignores only three things: the format of
    arguments, call ids that the template does not show, and the difference between empty and missing content.
    """
    spoken = [message for message in messages if message.role == "assistant"]
    if not spoken:
        return b""
    said = [
        [
            message.content or "",
            message.reasoning,
            [
                [each.name, canonical(each.arguments, sort=traits.sorts_keys), each.id]
                if traits.shows_call_ids
                else [each.name, canonical(each.arguments, sort=traits.sorts_keys)]
                for each in message.tool_calls
            ],
            message.name,
        ]
        for message in spoken
    ]
    return _digest(orjson.dumps(said))


def _answer(message: Message) -> bytes:
    """Return the part of an answer that all clients send back unchanged."""
    content, tool_calls = message.content or "", message.tool_calls
    if _THOUGHTS_END in content:
        content = _THOUGHTS.sub("", content)
    if not tool_calls and _CALLS_FOLLOW in content:
        content, tool_calls = _written_calls(content)
    calls: list[tuple[str, str]] = []
    if tool_calls:
        calls = [(call.name, canonical(call.arguments, sort=True).strip()) for call in tool_calls]
    return orjson.dumps([message.role, content.strip(), calls])


def _written_calls(content: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return ``content`` without the calls that smolagents wrote into it as a Python list, and these calls."""
    said, mark, written = content.rpartition(_CALLS_FOLLOW)
    written = written.strip()
    if not mark or len(written) > _LONGEST_CALLS or not (written.startswith("[") and written.endswith("]")):
        return content, ()
    try:
        functions = [each["function"] for each in ast.literal_eval(written)]
        calls = [ToolCall(_name(each["name"]), write(each["arguments"])) for each in functions]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return content, ()  # it is not a list of calls
    return said, tuple(calls)


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError("the name of a function is a string")
    name.encode()  # a Python literal may have half a surrogate pair, which UTF-8 cannot encode
    return name


def _digest(written: bytes) -> Key:
    return blake2b(written, digest_size=_DIGEST_BYTES).digest()
