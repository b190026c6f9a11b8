"""Deltas of an answer, and the message that they add up to.

A stream sends the deltas as they are made. An answer that is not streamed has the message that :func:`message` makes of
all deltas.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from slime_openai.requests.messages import Message, ToolCall

__all__ = [
    "Arguments",
    "CallStart",
    "Content",
    "Delta",
    "Reasoning",
    "Writer",
    "finish_reason",
    "message",
    "new_call_id",
]

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thoughts before the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of call number ``index`` of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON arguments of call ``index``."""

    index: int
    text: str


Delta: TypeAlias = Content | Reasoning | CallStart | Arguments


def new_call_id() -> str:
    """Return an id in OpenAI's form. Later ids sort after earlier ones, since some agents sort calls by id."""
    return f"call_{time.monotonic_ns():016x}{secrets.token_hex(4)}"


class Writer:
    """Makes deltas from the parts of an answer: thoughts, content and calls.

    White space right before a call, between calls, and at the end of an answer that ends with a call belongs to the
    format and is left out, like newlines around thoughts. White space between a call and content that follows it is
    kept. So white space is held back until the next part is known.

    ``tools``: the JSON schema of the parameters of each callable tool, by the tool's name. ``calls``: the number of
    calls so far. ``behind_call``: True while only white space has followed a call.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
        stream_reasoning: bool = True,
    ) -> None:
        self.tools = tools
        self.calls = 0
        self._new_id = new_id
        self._parallel = parallel
        self._stream_reasoning = stream_reasoning
        self._deltas: list[Delta] = []
        self._kind: Callable[[str], Delta] = Content
        self._pieces: list[str] = []
        self._space: list[str] = []
        self.behind_call = False

    def reasoning(self, text: str) -> None:
        """Add thoughts."""
        self._write(Reasoning, text, "\n")

    def end_reasoning(self) -> None:
        """End the thoughts."""
        self._space.clear()
        self._flush()

    def content(self, text: str) -> None:
        """Add content."""
        self._write(Content, text, _SPACE if self.tools else "")

    def start(self, name: str) -> bool:
        """Begin a call. Return False if the call is not allowed: its text is then content."""
        if name not in self.tools or (self.calls and not self._parallel):
            return False
        self._flush()
        self._deltas.append(CallStart(self.calls, self._new_id(), name))
        self._kind = partial(Arguments, self.calls)
        self.calls += 1
        self._space.clear()
        self.behind_call = True
        return True

    def arguments(self, text: str) -> None:
        """Add arguments of the call that began last."""
        if text:
            self._pieces.append(text)

    def drain(self) -> list[Delta]:
        """Return the deltas since the last drain. Without ``stream_reasoning``, incomplete thoughts wait."""
        if self._stream_reasoning or self._kind is not Reasoning:
            self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """Return the last deltas, at the end of the answer."""
        if not self.behind_call:
            self._pieces += self._space
        self._flush()
        return self.drain()

    def _write(self, kind: Callable[[str], Delta], text: str, space: str) -> None:
        """Write ``text``, but hold back the characters of ``space`` at its end."""
        if not text:
            return
        if self._kind is not kind:
            self._flush()
            self._kind = kind
        body = text.rstrip(space) if space else text
        if body:
            self._pieces += [*self._space, body]
            self._space.clear()
            self.behind_call = False
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _flush(self) -> None:
        if self._pieces:
            self._deltas.append(self._kind("".join(self._pieces)))
            self._pieces.clear()


def message(deltas: Iterable[Delta]) -> Message:
    """Return the message of all ``deltas``. Its content is None if there are calls and no content."""
    content, reasoning = [], []
    calls: list[tuple[CallStart, list[str]]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart():
                calls.append((delta, []))
            case _:
                calls[delta.index][1].append(delta.text)
    return Message(
        "assistant",
        content="".join(content) if content or not calls else None,
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(ToolCall(call.name, "".join(pieces), call.id) for call, pieces in calls),
    )


def finish_reason(reason: str, *, called: bool) -> str:
    """Return OpenAI's finish reason for the engine's ``reason``. ``called``: the answer has calls."""
    return "tool_calls" if called and reason == "stop" else reason
