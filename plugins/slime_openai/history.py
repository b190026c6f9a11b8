"""The conversations that the router has served, as the tree that they are.

A turn is what one request added to a conversation and what the model answered, as tokens: the very ones that
an engine consumed and sampled. Sub-agents and parallel branches of one session are branches of the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from slime_openai.identity import Key
from slime_openai.messages import Message

__all__ = ["History", "Turn"]

#: Sessions of which it is known that turns of theirs had to go.
_SESSIONS_REMEMBERED = 65_536
# What CPython 3.11 spends on a turn with all that hangs on it, tokens and text left out, and on a string.
_TURN_BYTES = 900
_STRING_BYTES = 49
# A character beyond ASCII takes up to four, and has one to four more once its string was written as JSON.
_WIDE = 6


class Turn:
    """``asked`` and ``sampled`` are packed int32 ids, ``asked`` those behind the ids of ``parent``.

    ``key``: of the conversation up to the ``reply``, message number ``count``, in which the client got the answer.
    ``text``: of asked and sampled ids, special tokens spelt out; ``ending``: the last part of it, which no reply
    shows; ``hidden``: how many of the sampled ids say that; ``closed``: it is a special token, the end of a turn.
    ``size_bytes``: memory that it takes, roughly.
    """

    __slots__ = (
        "asked",
        "closed",
        "count",
        "ending",
        "hidden",
        "key",
        "parent",
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
        words = [text, reply.content, reply.reasoning, *(call.arguments for call in reply.tool_calls)]
        self.size_bytes = _TURN_BYTES + len(asked) + len(sampled) + sum(map(_size_of, words))

    def chain(self) -> Iterator[Turn]:
        """This turn and those before it."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def likeness(self, messages: Sequence[Message]) -> int:
        """How much of what keys leave out came back as this turn and those before it said it."""
        return sum(_likeness(turn.reply, messages[turn.count - 1]) for turn in self.chain())

    def ids(self) -> bytes:
        """All ids up to its end. O(tokens)."""
        parts = [part for turn in self.chain() for part in (turn.sampled, turn.asked)]
        parts.reverse()
        return b"".join(parts)

    def whole_text(self) -> str:
        """The text of :meth:`ids`, special tokens spelt out."""
        parts = [turn.text for turn in self.chain()]
        parts.reverse()
        return "".join(parts)


def _size_of(text: str | None) -> int:
    """What ``text`` takes, for ever: CPython's own answer grows when it is written as JSON."""
    return _STRING_BYTES + len(text) * (1 if text.isascii() else _WIDE) if text is not None else 0


def _likeness(reply: Message, message: Message) -> int:
    ids = [call.id for call in reply.tool_calls]
    content = message.content or ""
    thoughts = reply.reasoning is not None and (
        message.reasoning == reply.reasoning or reply.reasoning in content
    )
    same_ids = bool(ids) and ids == [call.id for call in message.tool_calls]
    return 4 * same_ids + 2 * thoughts + (content == (reply.content or ""))


class History:
    """Turns by their conversation, the most recently used ones kept. Synchronous: one event loop needs no lock."""

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._turns: dict[Key, list[Turn]] = {}
        self._used: OrderedDict[Turn, None] = OrderedDict()
        self._incomplete: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def find(
        self, keys: Sequence[Key], messages: Sequence[Message], session: str | None
    ) -> tuple[Turn, int] | None:
        """The turn that a conversation with these ``keys`` goes on from, and the number of messages up to it.

        A session goes on from its own turns. Where it has none, it may go on where another one was, unless it has
        lost some: those could be meant. Among turns that read alike the one is meant whose calls, thoughts and
        words came back as they were; then the newest.
        """
        if session is not None:
            own = self._longest(keys, messages, lambda turn: turn.session == session)
            if own is not None or session in self._incomplete:
                return own
        return self._longest(keys, messages, lambda turn: True)

    def _longest(
        self, keys: Sequence[Key], messages: Sequence[Message], whose: Callable[[Turn], bool]
    ) -> tuple[Turn, int] | None:
        for count in range(len(keys), 0, -1):
            alike = [turn for turn in reversed(self._turns.get(keys[count - 1], ())) if whose(turn)]
            if len(alike) > 1:
                return max(alike, key=lambda turn: turn.likeness(messages)), count  # the first is the newest
            if alike:
                return alike[0], count
        return None

    def add(self, turn: Turn) -> None:
        """Keep ``turn`` and all that it goes on from; what was used longest ago makes room."""
        for one in turn.chain():  # a turn is older than what it goes on from, so ends go first
            if one in self._used:
                self._used.move_to_end(one)
            else:
                self._used[one] = None
                self._turns.setdefault(one.key, []).append(one)
                self.size_bytes += one.size_bytes
        self._make_room()

    def _make_room(self) -> None:
        while self._max_bytes and self.size_bytes > self._max_bytes and len(self._used) > 1:
            self._forget(next(iter(self._used)))

    def _forget(self, turn: Turn) -> None:
        del self._used[turn]
        self.size_bytes -= turn.size_bytes
        alike = self._turns[turn.key]
        alike.remove(turn)
        if not alike:
            del self._turns[turn.key]
        if turn.session is not None:
            self._lose(turn.session)

    def _lose(self, session: str) -> None:
        """Remember that turns of ``session`` had to go."""
        self._incomplete[session] = None
        if len(self._incomplete) > _SESSIONS_REMEMBERED:
            self._incomplete.popitem(last=False)
