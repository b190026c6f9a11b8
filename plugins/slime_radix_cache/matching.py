"""From a text to the longest context that is known for it: rules 3 to 6 of exact tokens.

Two questions look alike and differ in what may be the answer. *Generating* continues a context, so it may
start where a prompt ends only if that is the whole text: the tokens of a longer prompt are not those of its
beginning and its rest. *Reading* wants to know what was consumed and sampled, whatever comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from slime_radix_cache.segments import Context, Response, last_response
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

#: Ways to spell a text that are cut, at most, in search of the longest cut; and responses that are looked at.
_CUTS_TRIED = 32
_LOOKED_AT = 1024
#: Bytes of ids behind a cut on which it depended: of the token that it would have gone through, and of those that may
#: complete a character.
_AROUND_CUT = 4 * 4


class Match(NamedTuple):
    """The longest known context: ``context`` covers the first ``position`` bytes of the text.

    ``candidates``: recorded contexts with exactly this text. ``inside_response``: all of the text is recorded, and
    it ends within a response.
    """

    context: Context
    position: int
    candidates: int
    inside_response: bool


def _anyones(sampled: Response | None) -> bool:
    return True


def _owned_by(session: str) -> Whose:
    return lambda sampled: sampled is not None and sampled.session == session


def _nobodys_or(inherited: Collection[Response]) -> Whose:
    """Prompts alone say nothing in anybody's name."""
    return lambda sampled: sampled is None or sampled in inherited


def _in_order(session: str | None, inherited: Inherited) -> Iterator[Whose]:
    """Whose contexts to go on from: the session's own before longer ones of others.

    What follows its own words is not another one's, however alike it reads, so a session that has spoken in this
    text already takes only what it went on from then. One that has not may go on where another one was.
    """
    if session is None:
        yield _anyones
        return
    yield _owned_by(session)
    known = inherited()
    yield _anyones if known is None else _nobodys_or(known)


def find_to_continue(
    path: Path, text: bytes, cut: Cut, around: Around, session: str | None, inherited: Inherited
) -> Match:
    """Where generating from ``text`` goes on."""
    search = _Search(path, text, cut, around, reading=False)
    for whose in _in_order(session, inherited):
        match = search.longest(whose)
        if match is not None:
            return match
    return search.nothing()


def find_to_read(path: Path, text: bytes, cut: Cut, around: Around, session: str | None) -> Match:
    """The context that ``text`` stands for: the session's own, else one that covers all of it, else the longest."""
    search = _Search(path, text, cut, around, reading=True)
    own = search.longest(_owned_by(session)) if session is not None else None
    if own is not None and own.position == len(text):
        return own
    other = search.longest(_anyones)
    if other is not None and other.position == len(text):
        return other
    return own or other or search.nothing()


def find_given(
    along: Sequence[tuple[Response, int]], ids: bytes, session: str | None, inherited: Inherited
) -> Context:
    """The longest context whose tokens are the first of ``ids`` (packed).

    ``along`` are responses before which stand the first of them, and how many: see :class:`Starts`. Unlike text,
    given ids may go on from anywhere.
    """
    for whose in _in_order(session, inherited):
        best: Context = None
        covered = 0
        for response, place in along:
            context, length = _shared(response, ids[4 * place :], whose)
            if context is not None and place + length > covered:
                best, covered = context, place + length
        if best is not None:
            return best
    return None


def _shared(response: Response, ids: bytes, whose: Whose) -> tuple[Context, int]:
    """What of ``response`` begins as ``ids`` do, or else what it continues; and how many of ``ids`` that has."""
    common = _common_tokens(response.ids, ids) if response.ids[:4] == ids[:4] else 0
    if common and whose(response):
        return (response, common), common
    before = response.parent
    if before is not None and whose(last_response(before)):
        return (before, response.kept), 0
    return None, 0


def _common_tokens(sampled: bytes, given: bytes) -> int:
    ours, theirs = np.frombuffer(sampled, np.int32), np.frombuffer(given, np.int32)
    length = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:length] != theirs[:length])
    return int(differing[0]) if len(differing) else length


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
        found: tuple[Context, int] | None = None
        floor = 0
        for node in reversed(self._path.ended):
            context = self._ending_at(node, whose)
            if context is not None and self._around(self._text, node.depth) is None:
                found, floor = (context, node.depth), node.depth
                break
        if floor < self._path.position:
            found = self._longer_cut(floor, whose) or found
        return self._match(found)

    def nothing(self) -> Match:
        """No context at all: the text begins a new one."""
        match = self._match((None, 0))
        assert match is not None  # narrowing: only nothing gives nothing
        return match

    def _match(self, found: tuple[Context, int] | None) -> Match | None:
        if found is None:
            return None
        context, position = found
        path = self._path
        ends = path.node.ends if path.node.depth == path.position == len(self._text) else ()
        inside = path.position == len(self._text) and any(
            response.start < path.position for response in path.node.through
        )
        candidates = len(ends) if ends else int(context is not None and position == len(self._text))
        return Match(context, position, candidates, inside)

    def _ending_at(self, node: Node, whose: Whose) -> Context:
        """The newest context that ends at ``node`` and may be the answer, or go on there."""
        whole = node.depth == len(self._text)
        for segment in reversed(node.ends):
            if not whose(last_response(segment)):
                continue
            if whole and self._reading:
                return segment, len(segment)  # the hidden tail too: the model chose to stop
            if not isinstance(segment, Response):
                if whole or self._reading:
                    return segment, len(segment)
            else:
                length = segment.visible if node is segment.node else len(segment)
                if length > 0:
                    return segment, length
        return None

    def _longer_cut(self, floor: int, whose: Whose) -> tuple[Context, int] | None:
        """A response that the text leaves on its way, cut where its last whole token ends beyond ``floor``.

        Looks where the text ends first and then upwards: a response that left it earlier may have a
        token's end later than one that left it last.
        """
        best: tuple[Context, int] | None = None
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
