"""Search for the longest recorded context of a text, or of given ids.

For a generation, a context that ends with a recorded prompt must cover the whole text: a tokenizer may encode a longer
text in another way than the prompt and the rest separately. A retrieval finds what engines consumed and sampled, so in
a retrieval any text may follow a recorded prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from slime_radix_cache.index.ownership import ContextFilter, SpellingCheck, any_context, owned_by
from slime_radix_cache.index.segments import Context, Response, ids_before, last_response
from slime_radix_cache.index.text_index import Path
from slime_radix_cache.index.text_search import Around, Cut, Found, Match, Search, with_last_response

__all__ = ["find_given", "find_to_continue", "find_to_read"]


def find_to_continue(
    path: Path,
    text: bytes,
    cut: Cut,
    around: Around,
    session: str | None,
    others: Callable[[], ContextFilter],
    check: SpellingCheck | None,
) -> Match:
    """Return the context to continue for ``text``: the session's own, else the longest that ``others()`` allows.

    The session's own context is preferred even if another context is longer. ``others()`` returns a filter.
    """
    search = Search(path, text, cut, around, reading=False)
    found = search.own(session, check) if session is not None else None
    found = found or search.longest(others())
    context, position = found or (None, 0)
    node = next((one for one in reversed(path.stops) if one.depth <= position), None)
    return Match(
        context,
        position,
        unknown=check.unknown if check is not None else (),
        node=node if node is not None and node.depth == position else None,
    )


def find_to_read(path: Path, text: bytes, cut: Cut, around: Around, session: str | None) -> Match:
    """Return the context that ``text`` stands for. With ``session``, this is the first of these that exists:

    - the session's own longest context, if it has all of ``text``,
    - the context that the session sent as a prompt with exactly this text,
    - a contradictory response of the session with exactly this text,
    - the session's own longest context, even if it is shorter than ``text``,
    - a context of only prompts with exactly this text,
    - the longest context of any session.

    Without ``session``, this is the longest context, unless it is shorter than ``text`` and a contradictory response
    has exactly this text.
    """
    search = Search(path, text, cut, around, reading=True)
    check = SpellingCheck(session)
    own = search.own(session, check) if session is not None else search.longest(any_context())
    if own is None or own[1] < len(text):
        if session is not None and (asked := search.asked(session)) is not None:
            return search.matched(asked)._replace(is_asked=True)
        own = search.contradictory(session) or own
    if session is None or (own is not None and own[1] == len(text)):
        return search.matched(own)
    if own is not None and path.position < len(text):
        return search.matched(own)  # no context covers all of the text
    other, kind = search.alone(check), "asked"
    if other is None:
        other, kind = search.longest(any_context(check)), "sampled"
    match = search.matched(own or other)._replace(unknown=check.unknown)
    if other is None or other[1] < len(text):
        return match
    return match._replace(others="asked" if kind == "asked" else "sampled")


def find_given(
    along: Callable[[], Iterable[tuple[Response, int]]],
    ids: bytes,
    session: str | None,
    others: Callable[[], ContextFilter],
) -> Context:
    """Return the longest context whose tokens are a prefix of ``ids`` (packed): the session's own, else another one.

    ``along()`` returns the result of :meth:`Starts.along` for ``ids``. ``others()`` returns the filter for contexts
    that are not the session's own: only those that it allows are found. Unlike text, ids may continue a context after
    any of its tokens.
    """

    def longest(fitting: ContextFilter, since: float = 0) -> Found | None:
        best: Found | None = None
        for response, place in along():
            if best is not None and place + len(response) <= best[1]:
                continue
            shared = _shared(response, ids[4 * place :], fitting, since)
            if shared is not None and place + shared[1] > (best[1] if best is not None else 0):
                best = shared[0], place + shared[1]
                if 4 * best[1] == len(ids):
                    break  # no context can be longer; many answers to the same prompt may be as long
        return best

    found = None
    if session is not None:
        found = with_last_response(partial(longest, owned_by(session)), lambda last: len(ids_before(last)))
    found = found or longest(others())
    return found[0] if found is not None else None


def _shared(response: Response, ids: bytes, fitting: ContextFilter, since: float) -> Found | None:
    """Return the context up to the last token of ``response`` that ``ids`` share and ``fitting`` allows.

    Also return the number of these tokens of ``response``.

    ``ids``: packed, from the start of ``response`` on. If there is no such token, the context ends before ``response``.
    ``since``: see :func:`with_last_response`. None if ``fitting`` or ``since`` excludes the context.
    """
    common = _common_tokens(response.ids, ids) if response.packed[:4] == ids[:4] else 0
    if common and (length := fitting(response, common)):
        return (response, length), length
    before = response.parent
    if before is None or not fitting(before, response.kept):
        return None
    if since and ((last := last_response(before)) is None or len(ids_before(last)) < since):
        return None
    return (before, response.kept), 0


def _common_tokens(sampled: bytes, given: bytes) -> int:
    if given.startswith(sampled):
        return len(sampled) // 4  # the usual case
    ours, theirs = np.frombuffer(sampled, np.int32), np.frombuffer(given, np.int32)
    length = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:length] != theirs[:length])
    return int(differing[0]) if len(differing) else length
