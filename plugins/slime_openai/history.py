"""The conversations that the router has served, as the tree that they are.

A turn is what one request added to a conversation and what the model answered, as tokens: the very ones that
an engine consumed and sampled. Sub-agents and parallel branches of one session are branches of the tree.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from slime_openai.identity import Key
from slime_openai.messages import Message

__all__ = ["History", "Turn"]

# What CPython 3.11 spends on a turn with all that hangs on it, tokens and text left out.
_TURN_BYTES = 900


class Turn:
    """``asked`` and ``sampled`` are packed int32 ids, ``asked`` those behind the ids of ``parent``.

    ``key``: of the conversation up to the ``reply``, message number ``count``, in which the client got the answer.
    ``text``: of asked and sampled ids, special tokens spelt out; ``ending``: the last part of it, which no reply
    shows; ``hidden``: how many of the sampled ids say that.
    """

    __slots__ = ("asked", "count", "ending", "hidden", "key", "parent", "reply", "sampled", "session", "text")

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

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, roughly."""
        text = sys.getsizeof(self.text) + sys.getsizeof(self.reply.content or "")
        return _TURN_BYTES + len(self.asked) + len(self.sampled) + text

    def chain(self) -> Iterator[Turn]:
        """This turn and those before it."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

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


class History:
    """Turns by their conversation, the most recently used ones kept. Synchronous: one event loop needs no lock."""

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._turns: dict[Key, list[Turn]] = {}
        self._used: OrderedDict[Turn, None] = OrderedDict()
        self._sessions: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._used)

    def find(self, keys: Sequence[Key], session: str | None) -> tuple[Turn, int] | None:
        """The turn that a conversation with these ``keys`` goes on from, and the number of messages up to it.

        A session goes on from its own turns; one that has none may go on where another one was. Among turns that
        read alike the newest is meant.
        """
        own = session is not None and session in self._sessions
        for count in range(len(keys), 0, -1):
            for turn in reversed(self._turns.get(keys[count - 1], ())):
                if not own or turn.session == session:
                    return turn, count
        return None

    def add(self, turn: Turn) -> None:
        """Keep ``turn``; what was used longest ago makes room."""
        self._turns.setdefault(turn.key, []).append(turn)
        if turn.session is not None:
            self._sessions[turn.session] = self._sessions.get(turn.session, 0) + 1
        self.size_bytes += turn.size_bytes
        self._used[turn] = None
        for before in turn.chain():  # a turn is older than what it goes on from, so ends go first
            if before in self._used:
                self._used.move_to_end(before)
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
            self._sessions[turn.session] -= 1
            if not self._sessions[turn.session]:
                del self._sessions[turn.session]
