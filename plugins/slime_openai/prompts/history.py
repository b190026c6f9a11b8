"""The conversations that the router has served, as a tree of turns.

A turn is the messages that one request added to a conversation, and the model's answer. The tokens of a turn are the
tokens that an engine consumed and sampled. Sub-agents and parallel branches of one session are branches of the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from slime_openai.prompts.chat_turn import Answers, Turn
from slime_openai.prompts.identity import Key
from slime_openai.prompts.question import Question
from slime_openai.prompts.speakers import Speakers
from slime_openai.responses.evidence import LostSessions

__all__ = ["Alike", "Asking", "History"]


class Alike(NamedTuple):
    """Turns that differ only in what clients may change in answers, newest first.

    ``needs_check``: the turns belong to other sessions or to no session, and the session that asks may continue one of
    them only if Ownership allows it.
    """

    turns: list[Turn]
    needs_check: bool


class History:
    """Turns by the conversation that they end; the least recently used turns are evicted.

    No change of the history has an ``await`` in the middle, so the history needs no lock on one event loop.
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
        """Load the turns that ``question`` may continue. Return False if they cannot be read. May raise HTTPError."""
        return True

    def _is_anyones(self, turn: Turn) -> bool:
        """Return True if requests without a session may continue ``turn``."""
        return True

    def find(
        self, places: Sequence[Key], asked: Key, session: str | None, answers: Answers
    ) -> Iterator[Alike]:
        """Yield the turns that a conversation may continue: first the session's own turns, then other turns.

        In both groups, turns of longer conversations come first. ``places``: the conversation's key behind each
        message. ``asked``: the key of the messages before the answer. ``answers``: see Answers.

        A session continues its own turns. An earlier request of the session counts, too, if the key of its messages
        before the answer is one of ``places``: the session may continue the turn that this request continued, and all
        turns before that turn. Without such a request, this branch of the conversation is new to the session, which may
        continue any turn that Ownership allows. A session with lost turns continues only its own turns: another
        session's turn may look like the lost turn that the client means. A request without a session may continue the
        turns of all sessions, except those that :meth:`_is_anyones` rules out.
        """
        if session is None:
            yield from self._longest(places, answers, self._is_anyones)
            return
        # Both values are read now: the caller may await between two items, and meanwhile the values may change.
        is_lost = session in self._lost
        contexts = self._speakers.contexts(session, places, asked)
        yield from self._longest(places, answers, lambda turn: turn.session == session)
        if is_lost:
            return
        if contexts is None:
            yield from self._longest(places, answers, lambda turn: turn.session != session, needs_check=True)
            return
        taken = _turns_in(contexts)
        yield from self._longest(places, answers, lambda turn: turn in taken)

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
            found = (turn for turn in turns if is_open(turn) and self._is_latest(turn))
            alike = [turn for turn in found if turn.has_answers(answers)]
            if alike:
                yield Alike(alike, needs_check)

    def _is_latest(self, turn: Turn) -> bool:
        """Return False if the question of ``turn`` may have a later answer that is not in memory."""
        return True

    def asking(self, session: str | None, place: Key) -> Asking:
        """Begin a request of ``session``; ``place`` is the key of its messages before the answer, see Speakers."""
        return Asking(self._speakers, session, place, self.lose)

    def lose(self, session: str | None) -> None:
        """Remember that an answer of ``session`` cannot be continued."""
        if session is not None:
            self._lost.add(session)

    def add(self, turn: Turn) -> None:
        """Keep ``turn`` and all turns before it; evict the least recently used turns if there is no room."""
        # A parent is marked as used after the turn that continues it, so leaves are evicted first.
        for one in turn.chain():
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


def _turns_in(contexts: Iterable[Turn | None]) -> set[Turn]:
    """Return the turns in ``contexts``, and all turns before these. O(returned turns), also if contexts share turns."""
    found: set[Turn] = set()
    for context in contexts:
        while context is not None and context not in found:
            found.add(context)
            context = context.parent
    return found
