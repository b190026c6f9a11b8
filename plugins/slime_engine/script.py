"""Scripts: JSON Lines with one entry a line. The first entry that matches a prompt answers it.

::

    {"when": {"user": "weather", "turn": 1},
     "answer": {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}}      (on one line)
    {"when": {"tool": "rain"}, "answer": "Take an umbrella."}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime_engine.fields import is_int

__all__ = ["Call", "Conditions", "Entry", "Script", "read_script"]

_CONDITIONS = ("user", "tool", "prompt", "turn")
_ANSWER = ("content", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions on a prompt. All that are given must hold; an entry without conditions matches every prompt.

    ``user``: text in the last message, unless that is a tool's result. ``tool``: text in the tool results at the
    prompt's end. ``prompt``: a regular expression found anywhere in the prompt, markup included. ``turn``: 1 for the
    first answer of a conversation, 2 for the second. The prompt alone shows the turn, so conversations may overlap.
    """

    user: str | None = None
    tool: str | None = None
    prompt: re.Pattern[str] | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """The assistant's message for matching prompts. ``line``: its line in the file, counted from 1."""

    line: int
    when: Conditions
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Script:
    """The entries of the file at ``path``, in order."""

    path: str
    entries: tuple[Entry, ...]


class _Wrong(ValueError):
    """An invalid line; the message says what was wanted."""


def read_script(path: str) -> Script:
    """Read the script in a file. Raises ValueError. Its message names the file, and the line if one is wrong."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read the script {path}: {error.strerror}") from None
    return Script(path, tuple(_entries(path, lines)))


def _entries(path: str, lines: list[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _entry(number, orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        except _Wrong as error:
            raise ValueError(f"{path}:{number}: {error}") from None


def _entry(number: int, document: Any) -> Entry:
    given = _object("an entry", document, ("when", "answer"))
    if "answer" not in given:
        raise _Wrong('wanted {"when": {...}, "answer": ...}, got no "answer"')
    when = _conditions(_object('"when"', given.get("when", {}), _CONDITIONS))
    answer = given["answer"]
    if isinstance(answer, str):
        return Entry(number, when, answer)
    said = _object('"answer"', answer, _ANSWER)
    if not said:
        raise _Wrong(f'"answer" must be text, or an object with some of {", ".join(_ANSWER)}')
    calls = said.get("tool_calls", [])
    if not isinstance(calls, list):
        raise _Wrong(f'"tool_calls" must be a list, got {calls!r}')
    return Entry(
        number,
        when,
        _text(said, "content") or "",
        _text(said, "reasoning_content") or "",
        tuple(map(_call, calls)),
    )


def _conditions(given: Mapping[str, Any]) -> Conditions:
    pattern, turn = _text(given, "prompt"), given.get("turn")
    if turn is not None and (not is_int(turn) or turn < 1):
        raise _Wrong(f'"turn" must be a number from 1 on, got {turn!r}')
    try:
        prompt = None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise _Wrong(f'"prompt" must be a regular expression, got {pattern!r}: {error}') from None
    return Conditions(_text(given, "user"), _text(given, "tool"), prompt, turn)


def _call(document: Any) -> Call:
    given = _object("a call", document, ("name", "arguments"))
    name, arguments = given.get("name"), given.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise _Wrong(f'a call must be {{"name": ..., "arguments": {{...}}}}, got {document!r}')
    return Call(name, arguments)


def _object(what: str, document: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise _Wrong(f"{what} must be an object, got {document!r}")
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise _Wrong(f"{what} may have {', '.join(known)}, got {', '.join(unknown)}")
    return document


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise _Wrong(f'"{name}" must be a string, got {value!r}')
    return value
