"""Search for the contexts that a session may use, by text or by ids. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from slime_radix_cache.index.losses import Count, Losses
from slime_radix_cache.index.matching import find_given, find_to_continue, find_to_read
from slime_radix_cache.index.ownership import (
    ContextFilter,
    SpellingCheck,
    any_context,
    continued_by,
    inherited,
)
from slime_radix_cache.index.segments import Context, Response, context_ids, last_sampled
from slime_radix_cache.index.sessions import Sessions, responses_at
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
        """Return the context to continue for ``text``. The text after the match must be tokenised.

        Other clients may have given prompts as ids. A context with such a prompt is left out unless the tokenizer makes
        the same ids of the prompt's text. The match's ``unknown`` lists the prompts for which this is not known yet:
        compare them with the tokenizer, then search again.

        If another session sampled the last response of the found context, this session may have sent the same tokens
        before, spelt as another text (Unicode normalisation). So the session's requests are also searched by the ids of
        that context. If there are any, the search for the context is repeated, and considers these requests, too.
        """
        path = self._index.walk(text)
        check = SpellingCheck(session)

        def find(answers: Callable[[], Iterable[Response]], ids: bytes | None) -> Match:
            return find_to_continue(
                *(path, text, self._cut, self._around, self._known(session)),
                lambda: self._others(session, answers(), text, ids, check),
                check,
            )

        def by_text() -> Iterable[Response]:
            return responses_at(path.stops, session) if session is not None else ()

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
        """Return the context to continue for ``ids`` (packed). See find_given.

        The tokens of the context are a prefix of ``ids``. ``text``: the text of ``ids``.
        """
        along = partial(self._starts.along, ids)

        def others() -> ContextFilter:
            if session is None:
                return any_context()
            by_text = responses_at(self._index.walk(text).stops, session)
            answers = [*by_text, *(response for response, _ in along() if response.session == session)]
            return self._others(session, answers, text, ids, None)

        return find_given(along, ids, self._known(session), others)

    def decoded(self, ids: bytes) -> tuple[Response | None, int]:
        """Return a response with ``is_decoded`` that ends a prefix of ``ids`` (packed), and this prefix's length.

        The prefix has the tokens before the response, and all of the response. Its length is in tokens. Return
        ``(None, 0)`` if there is no such response.
        """
        for response, place in self._starts.along(ids):
            if response.is_decoded and ids.startswith(response.ids, 4 * place):
                return response, place + len(response)
        return None, 0

    def may_take(self, ids: bytes, session: str) -> bool:
        """Return False if ``session`` sent a prefix of ``ids`` (packed) as a prompt, but may not use all of ``ids``.

        A session may use the tokens of the context that :meth:`given` returns.
        """
        has_asked = any(response.session == session for response, _ in self._starts.along(ids))
        if not has_asked and next(self._sessions.asked(session, b"", ids), _NONE) is _NONE:
            return True
        return len(context_ids(self.given(ids, session))) == len(ids)

    def to_read(self, text: bytes, session: str | None = None) -> Match:
        """Return the context that ``text`` stands for."""
        return find_to_read(self._index.walk(text), text, self._cut, self._around, session)

    def candidates(self, text: bytes, match: Match | None = None) -> Count:
        """Count the contexts, kept and lost, that ``text`` may stand for. ``match``: the result of :meth:`to_read`.

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
        answers: Iterable[Response],
        text: bytes,
        ids: bytes | None,
        check: SpellingCheck | None,
    ) -> ContextFilter:
        """Return a filter for the contexts of other sessions that ``session`` may use if it has no context of its own.

        ``answers``: the session's responses to prompts that are beginnings of ``text`` or ``ids``. The session's first
        request of a branch may continue any context. Later requests of the branch may continue only the responses that
        earlier ones continued. If some responses or requests of the session are not known here (see Losses), the first
        request may be one of them. Then no request counts as the first.
        """
        if session is None:
            return any_context(check)
        contexts: dict[Context, None] = {}
        for response in answers:
            contexts[(response.parent, response.kept) if response.parent is not None else None] = None
        contexts |= dict.fromkeys(self._sessions.asked(session, text, ids))
        if not contexts and session not in self._losses:
            return any_context(check)
        return inherited(continued_by(contexts), check)
