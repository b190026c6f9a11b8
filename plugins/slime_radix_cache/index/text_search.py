"""Search along the path of a text for the longest context that ends there, whole or cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from slime_radix_cache.index.ownership import ContextFilter, SpellingCheck, inherited, owned_by
from slime_radix_cache.index.segments import Context, Prompt, Response, Segment, last_response
from slime_radix_cache.index.text_index import Path
from slime_radix_cache.index.text_node import Node

__all__ = ["Around", "Cut", "Found", "Match", "Search", "with_all_said"]

#: Counts a response's leading tokens that spell a prefix of a text, ending where a token and a character
#: ends, and the bytes that they spell. ``(0, 0)`` when none do. Arguments: packed ids, text in UTF-8.
Cut: TypeAlias = Callable[[bytes, bytes], tuple[int, int]]
#: Finds the beginning of the special token around a place in a text; None when no token is torn there.
Around: TypeAlias = "Callable[[bytes, int], int | None]"

#: A context, and where it ends.
Found: TypeAlias = "tuple[tuple[Segment, int], int]"

#: Limits of the search for the longest cut among responses of other sessions: spellings that are cut, and responses
#: that are looked at. A session's own responses are searched without limits.
_CUTS_TRIED = 32
_LOOKED_AT = 1024
#: Bytes of ids behind a cut on which it depended: of the token that it would have gone through, and of those that may
#: complete a character.
_AROUND_CUT = 4 * 4
#: The finish reason of a response that is still being sampled.
_RUNNING = "null"


class Match(NamedTuple):
    """The longest known context: ``context`` covers the first ``position`` bytes of the text.

    ``candidates``: recorded contexts that this text may stand for; with ``at_least`` there may be more.
    ``inside_response``: all of the text is recorded, and it ends within a response. ``others``: all of the text was
    ``asked``, or a part of it ``sampled``, but not in a context of the session that wants to know. ``is_asked``: that
    session asked with this context, and so continued all of it. ``unknown``: see SpellingCheck; contexts with one of
    these prompts were left out.
    """

    context: Context
    position: int
    candidates: int = 0
    at_least: bool = False
    inside_response: bool = False
    others: Literal["asked", "sampled"] | None = None
    is_asked: bool = False
    unknown: Sequence[Prompt] = ()


class Search:
    """One text's way through the index, and what is asked of it."""

    def __init__(self, path: Path, text: bytes, cut: Cut, around: Around, *, reading: bool) -> None:
        self._path = path
        self._text = text
        self._cut = cut
        self._around = around
        self._reading = reading

    def own(self, session: str, check: SpellingCheck | None) -> Found | None:
        """The longest context of ``session``; None without any."""
        longest = partial(self.longest, owned_by(session, check), exhaustive=True)
        return with_all_said(lambda since: longest(since=since), lambda said: said.start)

    def longest(self, fitting: ContextFilter, since: float = 0, *, exhaustive: bool = False) -> Found | None:
        """The longest ``fitting`` context, and where it ends. ``exhaustive``: look at all responses, without limits.

        A context that ends with a prompt counts only if its last response begins at ``since`` or later.
        """
        found: Found | None = None
        floor = 0
        for node in reversed(self._path.stops):
            context = self._ending_at(node, fitting, since)
            if context is not None and self._around(self._text, node.depth) is None:
                found, floor = (context, node.depth), node.depth
                break
        if floor < self._path.position:
            found = self._longer_cut(floor, fitting, exhaustive=exhaustive) or found
        return found

    def alone(self, check: SpellingCheck) -> Found | None:
        """A context of prompts alone with exactly this text: nobody sampled any of it."""
        context = self._ending_at(self._path.node, inherited({}, check), 0) if self._is_at_node else None
        return (context, len(self._text)) if context is not None else None

    def asked(self, session: str) -> Found | None:
        """The context with which ``session`` asked for an answer to exactly this text."""
        for response in reversed(self._path.node.begun_by(session) if self._is_at_node else ()):
            if response.is_fact and response.parent is not None:
                return (response.parent, response.kept), len(self._text)
        return None

    @property
    def _is_at_node(self) -> bool:
        return self._path.node.depth == self._path.position == len(self._text)

    def contradictory(self, session: str | None) -> Found | None:
        """The contradictory response to ``session`` (None: to anybody) with exactly this text."""
        if self._path.node.depth == len(self._text) == self._path.position:
            for segment in reversed(self._path.node.ends):
                if (
                    isinstance(segment, Response)
                    and not segment.is_fact
                    and session in (None, segment.session)
                ):
                    return (segment, len(segment)), len(self._text)
        return None

    def matched(self, found: Found | None) -> Match:
        """``found`` with what there is to be said of it."""
        path, size = self._path, len(self._text)
        context, position = found if found is not None else (None, 0)
        if path.position < size:
            return Match(context, position)
        ends = path.node.ends if path.node.depth == size else ()
        inside = any(response.start < size for response in path.node.through)
        cuts, at_least = self._cuts(ends)
        number = len(ends) + self._begun(ends) + cuts
        candidates = max(number, int(context is not None and position == size))
        return Match(context, position, candidates, at_least, inside)

    def _begun(self, ends: Collection[Segment]) -> int:
        """Count the contexts of responses that begin here and that neither end here nor are cut here.

        Such a context leaves out the hidden tail of a response, perhaps a stop token. Or it was recorded for another
        text, which writes such a token out where this text does not, or the reverse.
        """
        node = self._path.node
        begun = node.begins if self._is_at_node else ()
        if not begun:
            return 0
        hiding = {one for one in ends if isinstance(one, Response) and one.visible < len(one)}
        return len(
            {
                (parent, one.kept)
                for one in begun
                if (parent := one.parent) is not None
                and (
                    (parent in hiding and one.kept < len(parent))
                    or (parent not in ends and parent not in node.through)
                )
            }
        )

    def _cuts(self, ends: Collection[Segment]) -> tuple[int, bool]:
        """Count the responses that continue after the text and have a token's end there; True if there may be more."""
        count = 0
        passing = [one for one in self._path.node.through if one.start < len(self._text) and one not in ends]
        for response in passing[:_CUTS_TRIED]:
            _, covered = self._cut(response.ids, self._text[response.start :])
            count += response.start + covered == len(self._text)
        return count, len(passing) > _CUTS_TRIED

    def _ending_at(self, node: Node, fitting: ContextFilter, since: float) -> Context:
        """The newest context that ends at ``node`` and may be the answer, or go on there."""
        whole = node.depth == len(self._text)
        for segment in reversed(node.ends):
            if not isinstance(segment, Response):
                if not (whole or self._reading):
                    continue
                if since and ((said := last_response(segment)) is None or said.start < since):
                    continue
                length = len(segment)
            elif whole and self._reading and segment.finish_reason != _RUNNING:
                length = len(segment)  # the hidden tail too: the model chose to stop
            else:
                length = segment.visible if node is segment.node else len(segment)
            if length > 0 and fitting(segment, length) == length:
                return segment, length
        return None

    def _longer_cut(self, floor: int, fitting: ContextFilter, *, exhaustive: bool) -> Found | None:
        """The response whose cut, after a whole token, covers most of the text; None if not more than ``floor`` bytes.

        It looks at the end of the text first, and then upwards. A response that differs from the text earlier may have
        a later token's end in common with it than one that differs later.
        """
        best: Found | None = None
        spelt: list[tuple[int, bytes]] = []
        node: Node | None = self._path.node
        while node is not None and (end := min(self._path.position, node.depth)) > floor:
            for response, size in self._cuttable(node, end, fitting, exhaustive=exhaustive):
                start, ids = response.start, response.ids[: 4 * size]
                if any(start == begin and ids.startswith(known) for begin, known in spelt):
                    continue  # it was cut already, or one that begins with the same tokens
                if len(spelt) == _CUTS_TRIED and not exhaustive:
                    return best
                length, covered = self._cut(ids, self._text[start:end])
                spelt.append((start, ids[: 4 * length + _AROUND_CUT]))
                while length and (special := self._around(self._text, start + covered)) is not None:
                    length, covered = self._cut(ids, self._text[start:special])
                if length and start + covered > floor:
                    floor = start + covered
                    best = (response, length), floor
                    if floor == end:
                        return best
            node = node.parent
        return best

    def _cuttable(
        self, node: Node, end: int, fitting: ContextFilter, *, exhaustive: bool
    ) -> Iterable[tuple[Response, int]]:
        """Responses that may be cut on the edge to ``node``, newest first, and how many tokens of each are allowed."""
        found = (
            (one, size)
            for one in reversed(node.through)
            if one.start < end and (size := fitting(one, len(one)))
        )
        return found if exhaustive else islice(found, _LOOKED_AT)


def with_all_said(
    longest: Callable[[float], Found | None], begins: Callable[[Response], float]
) -> Found | None:
    """The longest context of a session; one that ends with a prompt must include the session's last response there.

    Another client may have sent a text of which the session has sampled a part. ``longest(since)`` takes contexts that
    end with a prompt only if their last response ``begins`` at ``since`` or later; with infinity it takes none of them.
    """
    found = longest(0)
    if found is None or isinstance(found[0][0], Response):
        return found
    said = longest(math.inf)
    if said is None:
        return found
    assert isinstance(said[0][0], Response)  # narrowing: the others were left out
    return longest(begins(said[0][0]))
