"""From a text to the longest context that is known for it: rules 3 to 6 of exact tokens.

Two questions look alike and differ in what may be the answer. *Generating* continues a context, so it may
start where a prompt ends only if that is the whole text: the tokens of a longer prompt are not those of its
beginning and its rest. *Reading* wants to know what was consumed and sampled, whatever comes after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from slime_radix_cache.segments import Context, Response, Segment, ids_before, last_response
from slime_radix_cache.text_index import Node, Path

__all__ = ["Around", "Cut", "Match", "find_given", "find_to_continue", "find_to_read"]

#: How many of a response's leading tokens spell a prefix of a text, ending where a token and a character
#: ends; and how many bytes they spell. ``(0, 0)`` when none do. Arguments: packed ids, text in UTF-8.
Cut: TypeAlias = Callable[[bytes, bytes], tuple[int, int]]
#: Where the special token begins that a place in a text lies inside of; None when no token is torn there.
Around: TypeAlias = "Callable[[bytes, int], int | None]"
#: Whether a context may be taken, by the last response in it.
Whose: TypeAlias = "Callable[[Response | None], bool]"
#: What a session went on from, of others' responses, in a text in which it has spoken; None when it has not.
Inherited: TypeAlias = "Callable[[], Collection[Response] | None]"

#: A context, and where it ends.
_Found: TypeAlias = "tuple[tuple[Segment, int], int]"

#: Ways to spell a text that are cut, at most, in search of the longest cut; and responses that are looked at.
_CUTS_TRIED = 32
_LOOKED_AT = 1024
#: Bytes of ids behind a cut on which it depended: of the token that it would have gone through, and of those that may
#: complete a character.
_AROUND_CUT = 4 * 4


class Match(NamedTuple):
    """The longest known context: ``context`` covers the first ``position`` bytes of the text.

    ``candidates``: recorded contexts with exactly this text. ``inside_response``: all of the text is recorded, and
    it ends within a response. ``passes_over``: it is another session's, and lacks what the one that asks has said.
    """

    context: Context
    position: int
    candidates: int
    inside_response: bool
    passes_over: bool = False


def _anyones(sampled: Response | None) -> bool:
    return True


def _owned_by(session: str) -> Whose:
    return lambda sampled: sampled is not None and sampled.session == session


def _nobodys_or(inherited: Collection[Response]) -> Whose:
    """Prompts alone say nothing in anybody's name."""
    return lambda sampled: sampled is None or sampled in inherited


def _others(session: str | None, inherited: Inherited) -> Whose:
    """Whose contexts to go on from where there is none of the session's own, which come before longer ones.

    What follows its own words is not another one's, however alike it reads, so a session that has spoken in this
    text already takes only what it went on from then. One that has not may go on where another one was.
    """
    known = inherited() if session is not None else None
    return _anyones if known is None else _nobodys_or(known)


def find_to_continue(
    path: Path, text: bytes, cut: Cut, around: Around, session: str | None, inherited: Inherited
) -> Match:
    """Where generating from ``text`` goes on."""
    search = _Search(path, text, cut, around, reading=False)
    own = search.own(session) if session is not None else None
    return own or search.longest(_others(session, inherited)) or search.nothing()


def find_to_read(path: Path, text: bytes, cut: Cut, around: Around, session: str | None) -> Match:
    """The context that ``text`` stands for: the session's own, else one that covers all of it, else the longest."""
    search = _Search(path, text, cut, around, reading=True)
    own = search.own(session) if session is not None else None
    if own is not None and own.position == len(text):
        return own
    other = search.longest(_anyones)
    if other is not None and other.position == len(text):
        return other._replace(passes_over=session is not None and _is_of(session, other.context))
    return own or other or search.nothing()


def find_given(
    along: Sequence[tuple[Response, int]], ids: bytes, session: str | None, inherited: Inherited
) -> Context:
    """The longest context whose tokens are the first of ``ids`` (packed).

    ``along`` are responses before which stand the first of them, and how many: see :class:`Starts`. Unlike text,
    given ids may go on from anywhere.
    """

    def longest(whose: Whose, since: float = 0) -> _Found | None:
        best: _Found | None = None
        for response, place in along:
            shared = _shared(response, ids[4 * place :], whose, since)
            if shared is not None and place + shared[1] > (best[1] if best is not None else 0):
                best = shared[0], place + shared[1]
        return best

    found = None
    if session is not None:
        found = _with_all_said(partial(longest, _owned_by(session)), lambda said: len(ids_before(said)))
    found = found or longest(_others(session, inherited))
    return found[0] if found is not None else None


def _shared(response: Response, ids: bytes, whose: Whose, since: float) -> _Found | None:
    """What of ``response`` begins as ``ids`` do, or else what it continues; and how many of ``ids`` that has."""
    common = _common_tokens(response.ids, ids) if response.ids[:4] == ids[:4] else 0
    if common and whose(response):
        return (response, common), common
    before = response.parent
    if before is None or not whose(said := last_response(before)):
        return None
    if since and (said is None or len(ids_before(said)) < since):
        return None
    return (before, response.kept), 0


def _common_tokens(sampled: bytes, given: bytes) -> int:
    ours, theirs = np.frombuffer(sampled, np.int32), np.frombuffer(given, np.int32)
    length = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:length] != theirs[:length])
    return int(differing[0]) if len(differing) else length


def _is_of(session: str, context: Context) -> bool:
    """True when ``session`` spoke last in ``context``."""
    return context is not None and _owned_by(session)(last_response(context[0]))


def _with_all_said(
    longest: Callable[[float], _Found | None], begins: Callable[[Response], float]
) -> _Found | None:
    """The longest one of a session, unless that is a prompt without what the session has said there since.

    Others may have sent a text of which it has sampled a part. ``longest(since)`` takes prompts only if their last
    response ``begins`` there or later, so with infinity none of them.
    """
    found = longest(0)
    if found is None or isinstance(found[0][0], Response):
        return found
    said = longest(math.inf)
    if said is None:
        return found
    assert isinstance(said[0][0], Response)  # narrowing: the others were left out
    return longest(begins(said[0][0]))


class _Search:
    """One text's way through the index, and what is asked of it."""

    def __init__(self, path: Path, text: bytes, cut: Cut, around: Around, *, reading: bool) -> None:
        self._path = path
        self._text = text
        self._cut = cut
        self._around = around
        self._reading = reading

    def longest(self, whose: Whose) -> Match | None:
        """The longest context among those; None without any."""
        return self._match(self._longest(whose))

    def own(self, session: str) -> Match | None:
        """The longest context of ``session``; None without any."""
        longest = partial(self._longest, _owned_by(session))
        return self._match(_with_all_said(longest, lambda said: said.start))

    def _longest(self, whose: Whose, since: float = 0) -> _Found | None:
        """The longest one, and where it ends. Of prompts only those whose last response begins ``since`` there."""
        found: _Found | None = None
        floor = 0
        for node in reversed(self._path.ended):
            context = self._ending_at(node, whose, since)
            if context is not None and self._around(self._text, node.depth) is None:
                found, floor = (context, node.depth), node.depth
                break
        if floor < self._path.position:
            found = self._longer_cut(floor, whose) or found
        return found

    def nothing(self) -> Match:
        """No context at all: the text begins a new one."""
        return self._matched(None, 0)

    def _match(self, found: _Found | None) -> Match | None:
        return self._matched(*found) if found is not None else None

    def _matched(self, context: Context, position: int) -> Match:
        path = self._path
        ends = path.node.ends if path.node.depth == path.position == len(self._text) else ()
        inside = path.position == len(self._text) and any(
            response.start < path.position for response in path.node.through
        )
        candidates = len(ends) if ends else int(context is not None and position == len(self._text))
        return Match(context, position, candidates, inside)

    def _ending_at(self, node: Node, whose: Whose, since: float) -> Context:
        """The newest context that ends at ``node`` and may be the answer, or go on there."""
        whole = node.depth == len(self._text)
        for segment in reversed(node.ends):
            said = last_response(segment)
            if not whose(said):
                continue
            if not isinstance(segment, Response):
                if (whole or self._reading) and (not since or (said is not None and said.start >= since)):
                    return segment, len(segment)
            elif whole and self._reading:
                return segment, len(segment)  # the hidden tail too: the model chose to stop
            else:
                length = segment.visible if node is segment.node else len(segment)
                if length > 0:
                    return segment, length
        return None

    def _longer_cut(self, floor: int, whose: Whose) -> _Found | None:
        """A response that the text leaves on its way, cut where its last whole token ends beyond ``floor``.

        Looks where the text ends first and then upwards: a response that left it earlier may have a
        token's end later than one that left it last.
        """
        best: _Found | None = None
        spelt: list[tuple[int, bytes]] = []
        node: Node | None = self._path.node
        while node is not None and (end := min(self._path.position, node.depth)) > floor:
            fitting = (one for one in reversed(node.through) if one.start < end and whose(one))
            for response in islice(fitting, _LOOKED_AT):
                start = response.start
                if any(start == begin and response.ids.startswith(ids) for begin, ids in spelt):
                    continue  # it was cut already, or one that begins with the same tokens
                if len(spelt) == _CUTS_TRIED:
                    return best
                length, covered = self._cut(response.ids, self._text[start:end])
                spelt.append((start, response.ids[: 4 * length + _AROUND_CUT]))
                while length and (special := self._around(self._text, start + covered)) is not None:
                    length, covered = self._cut(response.ids, self._text[start:special])
                if length and start + covered > floor:
                    floor = start + covered
                    best = (response, length), floor
                    if floor == end:
                        return best
            node = node.parent
        return best
