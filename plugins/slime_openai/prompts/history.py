"""The conversations that the router has served, as the tree that they are.

A turn is what one request added to a conversation, and the model's answer. Its tokens are those that an engine
consumed and sampled. Sub-agents and parallel branches of one session are branches of the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from slime_openai.prompts.identity import Key
from slime_openai.prompts.speakers import Speakers
from slime_openai.requests.messages import Message
from slime_openai.responses.evidence import LostSessions, Ownership

__all__ = ["Answers", "Asking", "History", "Turn"]

#: Returns what assistants say in the messages from the first number up to the second, to the letter.
Answers: TypeAlias = Callable[[int, int], bytes]
# Memory of a turn in CPython 3.11, with its parts but without tokens and text, and of a string.
_TURN_BYTES = 1_280
_STRING_BYTES = 49
# A character beyond ASCII takes up to four, and has one to four more once its string was written as JSON.
_WIDE = 6


class Turn:
    """``asked`` and ``sampled`` are packed int32 ids, ``asked`` those behind the ids of ``parent``.

    ``key``: of the conversation up to the ``reply``, message number ``count``, in which the client got the answer;
    ``place``: of the one that was asked; ``answers``: what other assistants say in its messages behind ``parent``.
    ``text``: of asked and sampled ids, special tokens spelt out; ``ending``: the last part of it, which no reply
    shows; ``hidden``: how many of the sampled ids say that; ``closed``: it is a special token, the end of a turn.
    ``size_bytes``: memory that it takes, roughly.
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
        words = [text, reply.content, reply.reasoning, *(call.arguments for call in reply.tool_calls)]
        self.size_bytes = _TURN_BYTES + len(asked) + len(sampled) + sum(map(_size_of, words))

    def chain(self) -> Iterator[Turn]:
        """This turn and those before it."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def is_behind(self, answers: Answers) -> bool:
        """True when a conversation with these ``answers`` leads here: other assistants in it say the same."""
        return all(
            answers(turn.parent.count if turn.parent is not None else 0, turn.count - 1) == turn.answers
            for turn in self.chain()
        )

    def likeness(self, messages: Sequence[Message]) -> int:
        """Score how much of the replies' call ids, thoughts and content, which keys leave out, ``messages`` repeat."""
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
    """Return the bytes that ``text`` takes at most: ``sys.getsizeof`` grows when it is written as JSON."""
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
    """Turns by their conversation, the most recently used ones kept. Synchronous: one event loop needs no lock.

    ``lost``: the sessions of which turns had to go, among others. ``ownership``: what sessions have asked as no chat;
    None where there is nothing else.
    """

    def __init__(self, max_bytes: int, lost: LostSessions, ownership: Ownership | None = None) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._lost = lost
        self._ownership = ownership
        self._turns: dict[Key, list[Turn]] = {}
        self._used: OrderedDict[Turn, None] = OrderedDict()
        self._speakers: Speakers[Turn] = Speakers()

    def __len__(self) -> int:
        return len(self._used)

    def find(
        self, places: Sequence[Key], asked: Key, session: str | None, answers: Answers
    ) -> Iterator[list[Turn]]:
        """Turns that a conversation may go on from, those up to its longest beginning first, the newest first.

        ``places``: its key behind each message, of which ``asked`` is the one to be answered; ``answers(first, last)``:
        what assistants say in these messages. Turns of one list read alike, but for what clients change in answers.

        A session goes on from its own turns. If it has asked before where this conversation passed, it may also take
        what those requests of its own went on from. If not, the branch is new to it, and it may go on from
        anybody's turn, unless it has lost some: those could be meant.
        """
        if session is None:
            return self._longest(places, answers, lambda turn: True)
        own = self._longest(places, answers, lambda turn: turn.session == session)
        if session in self._lost:
            return own
        contexts = self._speakers.contexts(session, places, asked)
        if contexts is None:
            return chain(own, self._longest(places, answers, lambda turn: self._may_take(turn, session)))
        taken = {turn for context in contexts if context is not None for turn in context.chain()}
        return chain(own, self._longest(places, answers, lambda turn: turn in taken))

    def _may_take(self, turn: Turn, session: str) -> bool:
        if turn.session == session or self._ownership is None:
            return turn.session != session
        return self._ownership.may_take(turn.ids(), session)

    def _longest(
        self, places: Sequence[Key], answers: Answers, is_open: Callable[[Turn], bool]
    ) -> Iterator[list[Turn]]:
        for place in reversed(places):
            turns = reversed(self._turns.get(place, ()))
            alike = [turn for turn in turns if is_open(turn) and turn.is_behind(answers)]
            if alike:
                yield alike

    def asking(self, session: str | None, place: Key) -> Asking:
        """A request at ``place`` begins: the session counts as having spoken there until it ends."""
        return Asking(self._speakers, session, place, self.lose)

    def lose(self, session: str | None) -> None:
        """Remember that something of ``session`` cannot be gone on from."""
        if session is not None:
            self._lost.add(session)

    def add(self, turn: Turn) -> None:
        """Keep ``turn`` and all that it goes on from; what was used longest ago makes room."""
        for one in turn.chain():  # a turn is older than what it goes on from, so ends go first
            if one in self._used:
                self._used.move_to_end(one)
            else:
                self._used[one] = None
                self._turns.setdefault(one.key, []).append(one)
                self.size_bytes += one.size_bytes
                if one.session is not None:
                    self._speakers.add(one.session, one.place, one.parent)
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
            self._speakers.remove(turn.session, turn.place, turn.parent)
            self._lost.add(turn.session)


class Asking:
    """One request on its way."""

    def __init__(
        self,
        speakers: Speakers[Turn],
        session: str | None,
        place: Key,
        lose: Callable[[str | None], None],
    ) -> None:
        self._end: list[Callable[[], None]] = []
        self._lose = lose
        self._context: tuple[str, Key, Turn | None] | None = None
        self._speakers = speakers
        self._session = session
        self._place = place
        if session is not None:
            self._end.append(speakers.deciding(session, place))

    def goes_on_from(self, parent: Turn | None) -> None:
        """It is decided; the last decision counts."""
        self._decided()
        if self._session is not None:
            if self._context is not None:
                self._speakers.remove(*self._context)
            self._context = (self._session, self._place, parent)
            self._speakers.add(*self._context)

    def _decided(self) -> None:
        while self._end:
            self._end.pop()()

    def end(self) -> None:
        """The request ends. Its session has spoken there, with a turn or without. Idempotent."""
        self._decided()
        context, self._context = self._context, None
        if context is not None:
            self._lose(self._speakers.leave(*context))
