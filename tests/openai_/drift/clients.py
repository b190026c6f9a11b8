"""Habits of clients: changes to an answer before they send it back as history."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["CLIENTS", "Habit"]

Message = dict[str, Any]
#: Changes an assistant's message, in place.
Habit = Callable[[Message], None]


def _verbatim(message: Message) -> None:
    """As it came, thoughts and all."""


def _without_thoughts(message: Message) -> None:
    """Most SDKs know no ``reasoning_content``."""
    message.pop("reasoning_content", None)


def _arguments_anew(message: Message) -> None:
    """langchain parses arguments, and writes them in its own way."""
    _without_thoughts(message)
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False, sort_keys=True)
    message["content"] = message["content"] or ""


def _arguments_as_objects(message: Message) -> None:
    _without_thoughts(message)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])


def _null_content(message: Message) -> None:
    _without_thoughts(message)
    message["content"] = message["content"] or None


def _stripped(message: Message) -> None:
    _without_thoughts(message)
    message["content"] = (message["content"] or "").strip()


def _parts(message: Message) -> None:
    """smolagents, litellm: content as a list."""
    _without_thoughts(message)
    if message["content"]:
        middle = len(message["content"]) // 2
        pieces = (message["content"][:middle], message["content"][middle:])
        message["content"] = [{"type": "text", "text": piece} for piece in pieces]


def _other_ids(message: Message) -> None:
    _without_thoughts(message)
    for number, call in enumerate(message.get("tool_calls", ())):
        call["id"] = f"id{number:07}"  # of nine characters, for Mistral's sake


def _thoughts_in_content(message: Message) -> None:
    """A client that was told the thoughts apart, and puts them back."""
    thoughts = message.pop("reasoning_content", None)
    if thoughts is not None:
        message["content"] = f"<think>\n{thoughts}\n</think>\n\n{message['content'] or ''}"


CLIENTS: dict[str, Habit] = {
    "verbatim": _verbatim,
    "without thoughts": _without_thoughts,
    "arguments anew": _arguments_anew,
    "arguments as objects": _arguments_as_objects,
    "null content": _null_content,
    "stripped": _stripped,
    "content in parts": _parts,
    "other call ids": _other_ids,
    "thoughts in content": _thoughts_in_content,
}
