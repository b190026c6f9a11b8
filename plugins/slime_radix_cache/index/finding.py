"""From texts and ids to the contexts that a session may take. Nothing is changed."""

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
    """Looks into the structures of Trajectories."""

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
        """The context to continue for ``text``; the text behind the match is to be tokenised.

        Contexts that have the ``unknown`` prompts were left out: look again when it is known whether those are odd. A
        session may have asked with the tokens of another one's context by another text, which the tokenizer normalises
        to the same. So there is a second look, by ids.
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
        """The longest context that ``ids`` (packed), which say ``text``, begin with."""
        along = partial(self._starts.along, ids)

        def others() -> ContextFilter:
            if session is None:
                return anybodys()
            by_text = spoken_at(self._index.walk(text).stops, session)
            spoken = [*by_text, *(response for response, _ in along() if response.session == session)]
            return self._others(session, spoken, text, ids, None)

        return find_given(along, ids, self._known(session), others)

    def may_take(self, ids: bytes, session: str) -> bool:
        """False when ``session`` has asked with the first of ``ids`` (packed), and did not go on with the others."""
        has_asked = any(response.session == session for response, _ in self._starts.along(ids))
        if not has_asked and next(self._sessions.asked(session, b"", ids), _NONE) is _NONE:
            return True
        return len(context_ids(self.given(ids, session))) == len(ids)

    def to_read(self, text: bytes, session: str | None = None) -> Match:
        """The context that ``text`` stands for."""
        return find_to_read(self._index.walk(text), text, self._cut, self._around, session)

    def candidates(self, text: bytes, match: Match | None = None) -> Count:
        """Count the contexts that ``text`` may stand for, lost ones included; ``match``: what :meth:`to_read` found.

        Where something is lost there may be more: nobody knows which beginnings of a lost text end with a token.
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
        """Contexts that ``session`` may take where it has none of its own; ``spoken``: its responses on the way.

        Its first request of a branch may continue anybody's, its later ones only the context that the first began with.
        If responses of the session are lost, or requests before a restart had no answer, no request is its first: the
        context that those began with is not known any more.
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
