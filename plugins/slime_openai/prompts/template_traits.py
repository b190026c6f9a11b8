"""Content that a chat template omits, found by probing the template."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

__all__ = ["STRICT", "TemplateTraits", "Trim", "probe"]

Message = Mapping[str, Any]
#: Returns the text of messages, with tools or without; None when the template refuses them.
Render = Callable[[Sequence[Message], bool], str | None]

_WORD = "probed word"
#: All characters that Python, and so Jinja's ``trim``, counts as white space.
_WHITE_SPACE = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_IDS = ("call00001", "call00002")


@dataclass(frozen=True, slots=True)
class Trim:
    """The characters that are dropped at each end of a content; None: all white space."""

    left: str | None = ""
    right: str | None = ""

    def of(self, content: str) -> str:
        """Return ``content`` without these characters.

        If nothing would be left, return ``content`` unchanged: a template that tests ``if content`` treats white space
        unlike an empty content.
        """
        trimmed = content
        if self.left != "":
            trimmed = trimmed.lstrip(self.left)
        if self.right != "":
            trimmed = trimmed.rstrip(self.right)
        return trimmed or content


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Traits of a template. ``trims``: what it drops from contents, by role.

    ``shows_tool_name``, ``shows_call_ids``: the template shows these in tool results. ``sorts_keys``: it sorts the keys
    of call arguments.
    """

    trims: Mapping[str, Trim] = field(default_factory=dict)
    shows_tool_name: bool = True
    shows_call_ids: bool = True
    sorts_keys: bool = False

    def content(self, role: str, content: str) -> str:
        """Return the part of ``content`` that the template shows."""
        trim = self.trims.get(role)
        return content if trim is None or trim.left == trim.right == "" else trim.of(content)


#: Traits of a template that leaves nothing out.
STRICT = TemplateTraits()


def probe(render: Render) -> TemplateTraits:
    """Return the traits of a template. If it refuses the probes of a trait, the trait has its value in STRICT."""
    return TemplateTraits(
        {role: _trim(render, role) for role in ("system", "tool", "user")},
        shows_tool_name=_differs(render, *(_with_result(name=name) for name in ("one", "two"))),
        shows_call_ids=_differs(render, *(_with_result(tool_call_id=id) for id in _IDS)),
        sorts_keys=not _differs(
            render, *([_user("?"), _call(arguments)] for arguments in ({"b": 1, "a": 2}, {"a": 2, "b": 1}))
        ),
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _call(arguments: Message) -> Message:
    function = {"name": "probed", "arguments": arguments}
    call = {"type": "function", "id": _IDS[0], "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_result(content: str = _WORD, **more: str) -> list[Message]:
    result = {"role": "tool", "content": content, "tool_call_id": _IDS[0], **more}
    return [_user("?"), _call({"a": "b"}), result]


def _differs(render: Render, one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Return True when the template writes the two conversations differently, or refuses one."""
    texts = [render(messages, tools) for messages in (one, other) for tools in (False, True)]
    return None in texts or texts[:2] != texts[2:]


def _contexts(role: str, content: str) -> Iterator[list[Message]]:
    """Yield conversations with ``content`` in all places in which a message of this ``role`` may stand."""
    answer = {"role": "assistant", "content": "!"}
    if role == "tool":
        results = _with_result(content)
        yield results
        yield [*results, answer, _user("?")]
        yield [*results, results[-1]]
        return
    message = {"role": role, "content": content}
    if role == "system":
        yield [message, _user("?")]
        yield [message, _user("?"), answer, _user("?")]
        yield [_user("?"), answer, message, _user("?")]
        return
    yield [message]
    yield [message, answer, _user("?")]
    yield [_user("?"), answer, message]
    yield [{"role": "system", "content": "!"}, message]
    yield [{"role": "system", "content": "!"}, message, answer, _user("?")]


def _trim(render: Render, role: str) -> Trim:
    bare = [[render(messages, tools) for tools in (False, True)] for messages in _contexts(role, _WORD)]
    left, right = (partial(_drops, render, role, bare, at_end=at_end) for at_end in (False, True))
    return Trim(_dropped(left), _dropped(right))


def _dropped(drops: Callable[[str], bool]) -> str | None:
    """Return the characters that are dropped at one end, in any number and order; None: all white space."""
    if drops(_WHITE_SPACE) and drops(_WHITE_SPACE[::-1]):
        return None
    found = "".join(char for char in string.whitespace if drops(char))
    return found if drops(found * 2) and drops(found[::-1]) else ""


def _drops(
    render: Render, role: str, bare: Sequence[Sequence[str | None]], white_space: str, *, at_end: bool
) -> bool:
    """Return True when ``white_space`` at one end of a content changes nothing, wherever the message stands.

    ``bare``: two texts for each place of the message, both without the white space: the first without tools, the second
    with tools.
    """
    if not white_space:
        return False
    content = _WORD + white_space if at_end else white_space + _WORD
    shown = False
    for texts, padded in zip(bare, _contexts(role, content), strict=True):
        for tools, text in zip((False, True), texts, strict=True):
            if text is None or _WORD not in text:
                continue
            shown = True
            if render(padded, tools) != text:
                return False
    return shown
