"""Records in the log of conversations, and a name for everything on which the keys of conversations depend.

Sizes of records are in tokens.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from router_core.types import Tokenizer
from slime_journal.fingerprint import fingerprint
from slime_journal.record_files import LogKind
from slime_openai.prompts.identity import answers_of, beginning, keys
from slime_openai.prompts.template_traits import TemplateTraits
from slime_openai.requests.messages import Message, ToolCall

__all__ = ["CHATS", "Gone", "Record", "Said", "reader", "size_of"]

#: A conversation with all roles, and with changes that clients make: its keys depend on all rules of comparison.
_SAMPLE = (
    Message("developer", " Be brief.\n"),
    Message("user", "Wie spät ist es in Rio?", name="alice"),
    Message(
        "assistant", "<think>hm</think>One moment.", (ToolCall("time", '{"b": [1.5], "a": "Rio"}', "c1"),)
    ),
    Message("tool", "12:00", tool_call_id="c1"),
    Message(
        "assistant", "Calling tools:\n[{'id': 'c2', 'function': {'name': 'f', 'arguments': {'x': None}}}]"
    ),
    Message("function", None, name="f"),
)


class Said(NamedTuple):
    """An added turn, with the fields of Turn. ``parent``: the serial number of its parent, or 0 without a parent.

    ``messages``: the turn's ``count``. ``content``, ``reasoning`` and ``calls`` are members of its ``reply``. Each call
    is a name, arguments and an id.
    """

    serial: int
    parent: int
    key: bytes
    messages: int
    session: str | None
    asked: bytes
    sampled: bytes
    content: str | None
    reasoning: str | None
    calls: tuple[tuple[str, str, str | None], ...]
    text: bytes
    ending: str
    hidden: int
    closed: bool
    place: bytes
    answers: bytes

    @property
    def size(self) -> int:
        return size_of(self.asked, self.sampled)


class Gone(NamedTuple):
    """An evicted turn."""

    serial: int
    size: int


Record: TypeAlias = Said | Gone

CHATS = LogKind(
    name="chats",
    format="slime-router chats 2",
    adds=(Said,),
    removes=Gone,
    others=(),
    foreign="conversations of another tokenizer or chat template, or of another version of slime-router",
    what_to_move="*.chats",
)


def size_of(asked: bytes, sampled: bytes) -> int:
    """Return the number of tokens of a turn, at least 1: turns of size 0 would stay in the file for ever."""
    return (len(asked) + len(sampled)) // 4 or 1


def reader(tokenizer: Tokenizer, template: str, traits: TemplateTraits) -> str:
    """Return a name that is the same for all routers that can use each other's records.

    Such routers have the same tokenizer, the same ``template``, and the same rules for keys of conversations.
    """
    start = beginning([{"name": "time"}], {"b": 1, "a": None})
    known = keys([start], _SAMPLE, traits)[-1] + answers_of(_SAMPLE, traits) + repr(traits).encode()
    digest = blake2b(known + template.encode(), digest_size=8).hexdigest()
    return f"{fingerprint(tokenizer)} {digest}"
