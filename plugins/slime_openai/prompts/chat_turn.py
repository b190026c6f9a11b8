"""A turn of a conversation: a request, and the model's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from slime_openai.prompts.identity import Key
from slime_openai.requests.messages import Message

__all__ = ["Answers", "Turn"]

#: Called with ``(first, last)``. Returns a digest of the assistants' messages at the indexes from ``first`` to
#: ``last - 1``.
Answers: TypeAlias = Callable[[int, int], bytes]
# Bytes of memory in CPython 3.11. A wide string is not ASCII. Each of its characters takes up to 4 bytes in the string,
# and up to 4 in a UTF-8 copy. CPython makes and keeps this copy when the string is written as JSON.
_TURN_BYTES = 1_280  # a turn without its tokens and text
_STRING_BYTES = 49  # an empty ASCII string
_WIDE_STRING_BYTES = 77  # a wide string without its characters, at most
_WIDE = 8  # a character of a wide string, at most


class Turn:
    """One request and its answer. ``asked``: the token ids that the request added to the ids of ``parent``.

    ``asked`` and ``sampled`` are packed int32 ids; ``text`` is the text of both, with special tokens. ``key``: the key
    (see ``identity``) of the conversation that ends with ``reply``. ``count``: the number of messages in this
    conversation. ``place``: the key of the messages before ``reply``. ``answers``: a digest of the assistants' messages
    between the reply of ``parent`` (or the beginning, without a parent) and ``reply``. ``ending``: the text of the stop
    token or stop string, which a reply usually does not show; empty if the answer has no such ending. ``hidden``: the
    number of sampled ids at the end that spell ``ending``; 0 if no ids spell exactly this text. ``closed``: the answer
    ended at a special token that is not one of the request's ``stop_token_ids``. ``size_bytes``: memory of the turn,
    roughly. ``record``: the key of the turn's record in a store, or empty.
    """

    __slots__ = (
        "answers",
        "asked",
        "closed",
        "count",
        "ending",
        "hidden",
        "key",
        "parent",
        "place",
        "record",
        "reply",
        "sampled",
        "session",
        "size_bytes",
        "text",
    )

    def __init__(
        self,
        parent: Turn | None,
        key: Key,
        count: int,
        session: str | None,
        asked: bytes,
        sampled: bytes,
        reply: Message,
        text: str,
        ending: str,
        hidden: int,
        closed: bool,
        place: Key,
        answers: bytes,
    ) -> None:
        self.parent = parent
        self.key = key
        self.count = count
        self.session = session
        self.asked = asked
        self.sampled = sampled
        self.reply = reply
        self.text = text
        self.ending = ending
        self.hidden = hidden
        self.closed = closed
        self.place = place
        self.answers = answers
        self.record = b""
        words = [text, reply.content, reply.reasoning, *(call.arguments for call in reply.tool_calls)]
        self.size_bytes = _TURN_BYTES + len(asked) + len(sampled) + sum(map(_size_of, words))

    def chain(self) -> list[Turn]:
        """Return this turn and the turns before it, the latest first."""
        turns = [self]
        while (before := turns[-1].parent) is not None:
            turns.append(before)
        return turns

    def has_answers(self, answers: Answers) -> bool:
        """Return True when ``answers`` returns the recorded digest for this turn, and for each turn before it."""
        last: Turn | None = self
        while last is not None:
            before = last.parent
            if answers(before.count if before is not None else 0, last.count - 1) != last.answers:
                return False
            last = before
        return True

    def likeness(self, messages: Sequence[Message]) -> int:
        """Score how exactly ``messages`` repeat the recorded call ids, thoughts and content.

        Turns with equal keys may differ in these.
        """
        return sum(_likeness(turn.reply, messages[turn.count - 1]) for turn in self.chain())

    def ids(self) -> bytes:
        """Return all ids up to the end of this turn. O(tokens)."""
        return b"".join([part for turn in reversed(self.chain()) for part in (turn.asked, turn.sampled)])

    def whole_text(self) -> str:
        """Return the text of :meth:`ids`, with special tokens."""
        return "".join([turn.text for turn in reversed(self.chain())])


def _size_of(text: str | None) -> int:
    """Return the most bytes that ``text`` may take. Before it is written as JSON, ``sys.getsizeof`` returns less."""
    if text is None:
        return 0
    return _STRING_BYTES + len(text) if text.isascii() else _WIDE_STRING_BYTES + _WIDE * len(text)


def _likeness(reply: Message, message: Message) -> int:
    ids = [call.id for call in reply.tool_calls]
    content = message.content or ""
    thoughts = reply.reasoning is not None and (
        message.reasoning == reply.reasoning or reply.reasoning in content
    )
    same_ids = bool(ids) and ids == [call.id for call in message.tool_calls]
    return 4 * same_ids + 2 * thoughts + (content == (reply.content or ""))
