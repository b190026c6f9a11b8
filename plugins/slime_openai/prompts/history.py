"""The conversations that the router has served, as a tree of turns.

A turn is the messages that one request added to a conversation, and the model's answer. Its tokens are the
tokens that an engine consumed and sampled. Sub-agents and parallel branches of one session are branches of the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from slime_openai.prompts.identity import Key
from slime_openai.prompts.question import Question
from slime_openai.prompts.speakers import Speakers
from slime_openai.requests.messages import Message
from slime_openai.responses.evidence import LostSessions

__all__ = ["Alike", "Answers", "Asking", "History", "Turn"]

#: ``(first, last)``: returns a digest of the assistants' messages from index ``first`` up to, not including, ``last``.
Answers: TypeAlias = Callable[[int, int], bytes]
# Bytes of memory in CPython 3.11. A wide string is not ASCII. Each of its characters takes up to 4 bytes in the string,
# and up to 4 in a UTF-8 copy. CPython makes and keeps this copy when the string is written as JSON.
_TURN_BYTES = 1_280  # a turn without its tokens and text
_STRING_BYTES = 49  # an empty ASCII string
_WIDE_STRING_BYTES = 77  # a wide string without its characters, at most
_WIDE = 8  # a character of a wide string, at most


class Turn:
    """One request and its answer. ``asked``: the ids that the request added to the ids of ``parent``.

    ``asked`` and ``sampled`` are packed int32 ids; ``text`` is their text, with special tokens. ``key``: the key of the
    conversation that ends with ``reply``, message number ``count``. ``place``: the key of the conversation before
    ``reply``. ``answers``: a digest of the assistants' messages between ``parent`` and ``reply``. ``ending``: the stop
    token or stop string, which a reply usually does not show. ``hidden``: the number of sampled ids that spell the
    ending. ``closed``: the ending is a special token, but not one of the request's ``stop_token_ids``. ``size_bytes``:
    memory of the turn, roughly. ``record``: the key of its record in a store, or empty.
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

    def chain(self) -> Iterator[Turn]:
        """Yield this turn and the turns before it, the latest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def has_answers(self, answers: Answers) -> bool:
        """Return True when ``answers`` gives the digest of this turn, and of each turn before it."""
        return all(
            answers(turn.parent.count if turn.parent is not None else 0, turn.count - 1) == turn.answers
            for turn in self.chain()
        )

    def likeness(self, messages: Sequence[Message]) -> int:
        """Score how exactly ``messages`` repeat call ids, thoughts and content, which keys do not compare exactly."""
        return sum(_likeness(turn.reply, messages[turn.count - 1]) for turn in self.chain())

    def ids(self) -> bytes:
        """Return all ids up to the end of this turn. O(tokens)."""
        parts = [part for turn in self.chain() for part in (turn.sampled, turn.asked)]
        parts.reverse()
        return b"".join(parts)

    def whole_text(self) -> str:
        """Return the text of :meth:`ids`, with special tokens."""
        parts = [turn.text for turn in self.chain()]
        parts.reverse()
        return "".join(parts)


class Alike(NamedTuple):
    """Turns that differ only in what clients may change in answers, newest first.

    ``needs_check``: the turns belong to other sessions. The session may continue one only if Ownership allows it.
    """

    turns: list[Turn]
    needs_check: bool


def _size_of(text: str | None) -> int:
    """Return the most bytes that ``text`` may take. ``sys.getsizeof`` returns less until it is written as JSON."""
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


class History:
    """Turns by their conversation; the least recently used are evicted. No change awaits, so no lock is needed.

    ``lost``: the sessions that have lost turns or other records.
    """

    def __init__(self, max_bytes: int, lost: LostSessions) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._lost = lost
        self._turns: dict[Key, list[Turn]] = {}
        self._used: OrderedDict[Turn, None] = OrderedDict()
        self._speakers: Speakers[Turn] = Speakers()

    def __len__(self) -> int:
        return len(self._used)

    async def load(self, question: Question) -> bool:
        """Load the turns that ``question`` may continue; False: they cannot be read now. May raise HTTPError."""
        return True

    def _is_anyones(self, turn: Turn) -> bool:
        """Return True if requests without a session may continue ``turn``."""
        return True

    def find(
        self, places: Sequence[Key], asked: Key, session: str | None, answers: Answers
    ) -> Iterator[Alike]:
        """Yield the turns that a conversation may continue: the session's own turns, then others, each longest first.

        ``places``: the conversation's key behind each message; ``asked``: its key before the answer. ``answers``: see
        Answers.

        A session continues its own turns. If it has asked before at one of ``places``, it may also continue the turns
        that it continued there, and earlier turns. Otherwise the branch is new to it, and it may continue any
        turn that Ownership allows. A session with lost turns continues only its own, since the client may mean a lost
        turn.
        """
        if session is None:
            return self._longest(places, answers, self._is_anyones)
        own = self._longest(places, answers, lambda turn: turn.session == session)
        if session in self._lost:
            return own
        contexts = self._speakers.contexts(session, places, asked)
        if contexts is None:
            others = self._longest(places, answers, lambda turn: turn.session != session, needs_check=True)
            return chain(own, others)
        taken = {turn for context in contexts if context is not None for turn in context.chain()}
        return chain(own, self._longest(places, answers, lambda turn: turn in taken))

    def _longest(
        self,
        places: Sequence[Key],
        answers: Answers,
        is_open: Callable[[Turn], bool],
        *,
        needs_check: bool = False,
    ) -> Iterator[Alike]:
        for place in reversed(places):
            turns = reversed(self._turns.get(place, ()))
            alike = [turn for turn in turns if is_open(turn) and turn.has_answers(answers)]
            if alike:
                yield Alike(alike, needs_check)

    def asking(self, session: str | None, place: Key) -> Asking:
        """Begin a request of ``session`` at ``place``. From then on, the session counts as having asked there."""
        return Asking(self._speakers, session, place, self.lose)

    def lose(self, session: str | None) -> None:
        """Remember that an answer of ``session`` cannot be continued."""
        if session is not None:
            self._lost.add(session)

    def add(self, turn: Turn) -> None:
        """Keep ``turn`` and all turns before it; evict the least recently used turns if there is no room."""
        for one in turn.chain():  # a parent is used after its child here, so leaves are evicted first
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
        self._note_eviction(turn)

    def _note_eviction(self, turn: Turn) -> None:
        if turn.session is not None:
            self._lost.add(turn.session)


class Asking:
    """One request in flight. ``on_end`` is called when the request ends."""

    def __init__(
        self,
        speakers: Speakers[Turn],
        session: str | None,
        place: Key,
        lose: Callable[[str | None], None],
    ) -> None:
        self._stop_deciding: list[Callable[[], None]] = []
        self._lose = lose
        self._context: tuple[str, Key, Turn | None] | None = None
        self._speakers = speakers
        self._session = session
        self._place = place
        self.on_end: Callable[[], None] | None = None
        if session is not None:
            self._stop_deciding.append(speakers.deciding(session, place))

    def continues_from(self, parent: Turn | None) -> None:
        """Note that the request continues ``parent`` (None: no turn). Only the last call counts."""
        self._decided()
        if self._session is not None:
            if self._context is not None:
                self._speakers.remove(*self._context)
            self._context = (self._session, self._place, parent)
            self._speakers.add(*self._context)

    def _decided(self) -> None:
        while self._stop_deciding:
            self._stop_deciding.pop()()

    def end(self) -> None:
        """End the request, with or without a recorded turn. A second call does nothing."""
        self._decided()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        context, self._context = self._context, None
        if context is not None:
            self._lose(self._speakers.leave(*context))
