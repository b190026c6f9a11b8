"""Search for the contexts that a session may take, by text or by ids. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from slime_radix_cache.index.losses import Count, Losses
from slime_radix_cache.index.matching import find_given, find_to_continue, find_to_read
from slime_radix_cache.index.ownership import ContextFilter, SpellingCheck, anybodys, continued_by, inherited
from slime_radix_cache.index.segments import Context, Response, context_ids, last_sampled
from slime_radix_cache.index.sessions import Sessions, spoken_at
from slime_radix_cache.index.starts import Starts
from slime_radix_cache.index.text_index import TextIndex
from slime_radix_cache.index.text_search import Around, Cut, Match

__all__ = ["Finder"]

_NONE = object()  # a context may be None


class Finder:
    """Searches in the structures of Trajectories."""

    def __init__(
        self, index: TextIndex, starts: Starts, sessions: Sessions, losses: Losses, cut: Cut, around: Around
    ) -> None:
        self._index = index
        self._starts = starts
        self._sessions = sessions
        self._losses = losses
        self._cut = cut
        self._around = around

    def to_continue(self, text: bytes, session: str | None = None) -> Match:
        """Return the context to continue for ``text``; the text after the match must be tokenised.

        Contexts with the ``unknown`` prompts of the match were left out: compare these prompts, then search again.
        The session may have sent the tokens of another session's context as another text, if the tokenizer normalises
        both to the same. So a second search by ids follows.
        """
        path = self._index.walk(text)
        check = SpellingCheck(session)

        def find(spoken: Callable[[], Iterable[Response]], ids: bytes | None) -> Match:
            return find_to_continue(
                *(path, text, self._cut, self._around, self._known(session)),
                lambda: self._others(session, spoken(), text, ids, check),
                check,
            )

        def by_text() -> Iterable[Response]:
            return spoken_at(path.stops, session) if session is not None else ()

        match = find(by_text, None)
        last = last_sampled(match.context)
        if session is None or last is None or last[0].session == session:
            return match
        ids = context_ids(match.context)
        by_ids = [response for response, _ in self._starts.along(ids) if response.session == session]
        if not by_ids and next(self._sessions.asked(session, b"", ids), _NONE) is _NONE:
            return match
        return find(lambda: chain(by_text(), by_ids), ids)

    def given(self, ids: bytes, session: str | None = None, text: bytes = b"") -> Context:
        """Return the longest context that ``ids`` (packed) begin with. ``text``: their text."""
        along = partial(self._starts.along, ids)

        def others() -> ContextFilter:
            if session is None:
                return anybodys()
            by_text = spoken_at(self._index.walk(text).stops, session)
            spoken = [*by_text, *(response for response, _ in along() if response.session == session)]
            return self._others(session, spoken, text, ids, None)

        return find_given(along, ids, self._known(session), others)

    def decoded(self, ids: bytes) -> tuple[Response | None, int]:
        """Return a decoded response at the end of the first of ``ids`` (packed), and their number."""
        for response, place in self._starts.along(ids):
            if response.is_decoded and ids.startswith(response.ids, 4 * place):
                return response, place + len(response)
        return None, 0

    def may_take(self, ids: bytes, session: str) -> bool:
        """Return False if ``session`` sent the first of ``ids`` (packed) as a prompt, but has no context of all."""
        has_asked = any(response.session == session for response, _ in self._starts.along(ids))
        if not has_asked and next(self._sessions.asked(session, b"", ids), _NONE) is _NONE:
            return True
        return len(context_ids(self.given(ids, session))) == len(ids)

    def to_read(self, text: bytes, session: str | None = None) -> Match:
        """Return the context that ``text`` stands for."""
        return find_to_read(self._index.walk(text), text, self._cut, self._around, session)

    def candidates(self, text: bytes, match: Match | None = None) -> Count:
        """Count the contexts that ``text`` may stand for, lost ones included. ``match``: the result of :meth:`to_read`.

        After any loss the count is a lower bound: ``text`` may be the beginning of a lost text.
        """
        match = match if match is not None else self.to_read(text)
        lost = self._losses.texts
        return Count(match.candidates + lost.count(text).number, match.at_least or lost.number > 0)

    def _known(self, session: str | None) -> str | None:
        return session if session is not None and session in self._sessions else None

    def _others(
        self,
        session: str | None,
        spoken: Iterable[Response],
        text: bytes,
        ids: bytes | None,
        check: SpellingCheck | None,
    ) -> ContextFilter:
        """Return a filter for contexts that ``session`` may take if it has none of its own.

        ``spoken``: its responses to beginnings of the text or ids. Its first request of a branch may continue any
        context; later ones only the context that the first began with. If the session lost responses, or had unanswered
        requests before a restart, no request counts as its first: the context of the first is not known any more.
        """
        if session is None:
            return anybodys(check)
        contexts: dict[Context, None] = {}
        for response in spoken:
            contexts[(response.parent, response.kept) if response.parent is not None else None] = None
        contexts |= dict.fromkeys(self._sessions.asked(session, text, ids))
        if not contexts and session not in self._losses:
            return anybodys(check)
        return inherited(continued_by(contexts), check)
