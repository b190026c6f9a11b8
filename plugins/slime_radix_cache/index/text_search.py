"""Search along the path of a text for the longest context. A *cut* context ends within a response."""

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

__all__ = ["Around", "Cut", "Found", "Match", "Search", "with_last_response"]

#: Returns how many first tokens of a response spell a prefix of a text, and how many bytes they spell. The prefix ends
#: with a whole token and a whole character. ``(0, 0)``: there is no such prefix. Arguments: packed ids, text in UTF-8.
Cut: TypeAlias = Callable[[bytes, bytes], tuple[int, int]]
#: Returns the start of the special token around a place in a text; None if the place is not inside a special token.
Around: TypeAlias = "Callable[[bytes, int], int | None]"

#: A context, and where it ends.
Found: TypeAlias = "tuple[tuple[Segment, int], int]"

#: Limits of the search for the longest cut among responses of other sessions: the number of responses that are decoded
#: in one search, and the number that are visited at each node. A session's own responses are searched without limits.
_CUTS_TRIED = 32
_LOOKED_AT = 1024
#: Bytes of the ids after a cut that decide where the cut is: the token around the cut, and tokens that may complete a
#: character.
_AROUND_CUT = 4 * 4
#: The finish reason of a response without a recorded end: it is still being sampled, or its stream broke off.
_RUNNING = "null"


class Match(NamedTuple):
    """The result of a search: ``context`` covers the first ``position`` bytes of the text.

    ``candidates``: number of recorded contexts that this text may stand for; ``at_least``: there may be more.
    ``inside_response``: all of the text is recorded, and its last byte is in a response. ``others``: set if only other
    sessions have all of the text: "asked" if a context of only prompts has all of it, else "sampled". ``is_asked``: the
    session of the search sent a request with this context, and so continued all of it. ``unknown``: see SpellingCheck;
    contexts with one of these prompts were left out. ``node``: the node at ``position``, if there is one.
    """

    context: Context
    position: int
    candidates: int = 0
    at_least: bool = False
    inside_response: bool = False
    others: Literal["asked", "sampled"] | None = None
    is_asked: bool = False
    unknown: Sequence[Prompt] = ()
    node: Node | None = None


class Search:
    """Searches along the path of one text through the index.

    ``reading``: the search is for a retrieval. A search for a generation finds a context that ends with a prompt only
    if the context has all of the text.
    """

    def __init__(self, path: Path, text: bytes, cut: Cut, around: Around, *, reading: bool) -> None:
        self._path = path
        self._text = text
        self._cut = cut
        self._around = around
        self._reading = reading

    def own(self, session: str, check: SpellingCheck | None) -> Found | None:
        """Return the longest context of ``session``, or None."""
        longest = partial(self.longest, owned_by(session, check), exhaustive=True)
        return with_last_response(lambda since: longest(since=since), lambda last: last.start)

    def longest(self, fitting: ContextFilter, since: float = 0, *, exhaustive: bool = False) -> Found | None:
        """Return the longest ``fitting`` context, and where it ends. ``exhaustive``: search without limits.

        Unless ``since`` is 0, a context that ends with a prompt counts only if its last response begins at ``since`` or
        later.
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
        """Return a context of only prompts (no sampled token) with exactly this text, or None."""
        context = self._ending_at(self._path.node, inherited({}, check), 0) if self._is_at_node else None
        return (context, len(self._text)) if context is not None else None

    def asked(self, session: str) -> Found | None:
        """Return the context that ``session`` sent as a prompt with exactly this text, or None."""
        for response in reversed(self._path.node.begun_by(session) if self._is_at_node else ()):
            if response.is_fact and response.parent is not None:
                return (response.parent, response.kept), len(self._text)
        return None

    @property
    def _is_at_node(self) -> bool:
        return self._path.node.depth == self._path.position == len(self._text)

    def contradictory(self, session: str | None) -> Found | None:
        """Return the newest contradictory response with exactly this text, or None.

        If ``session`` is not None, only its responses count.
        """
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
        """Return ``found`` as a Match, with the number of candidates."""
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
        """Count the contexts that responses continue from the end of the text.

        Segments that end there, and responses that are cut there, are counted elsewhere. The remaining contexts are of
        two kinds. One kind leaves out the hidden tail of a response that ends there, such as a stop token. The other
        kind has the tokens of this text, but was recorded with another text: only one of the two texts spells out a
        special token.
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
        """Count the responses that go on after the end of the text, and have a token that ends at this place.

        Returns the number, and True if there may be more.
        """
        count = 0
        passing = [one for one in self._path.node.through if one.start < len(self._text) and one not in ends]
        for response in passing[:_CUTS_TRIED]:
            _, covered = self._cut(response.ids, self._text[response.start :])
            count += response.start + covered == len(self._text)
        return count, len(passing) > _CUTS_TRIED

    def _ending_at(self, node: Node, fitting: ContextFilter, since: float) -> Context:
        """Return the newest ``fitting`` context that ends at ``node``, or None."""
        whole = node.depth == len(self._text)
        for segment in reversed(node.ends):
            if not isinstance(segment, Response):
                if not (whole or self._reading):
                    continue
                if since and ((last := last_response(segment)) is None or last.start < since):
                    continue
                length = len(segment)
            elif whole and self._reading and segment.finish_reason != _RUNNING:
                length = len(segment)  # with the hidden tail, such as a stop token: the response has ended
            else:
                length = segment.visible if node is segment.node else len(segment)
            if length > 0 and fitting(segment, length) == length:
                return segment, length
        return None

    def _longer_cut(self, floor: int, fitting: ContextFilter, *, exhaustive: bool) -> Found | None:
        """Return the longest context found that ends with a cut response, after a whole token, and where it ends.

        None if no context found covers more than ``floor`` bytes of the text. Unless ``exhaustive``, only some of the
        responses are tried, so a longer context may be missed.
        The search goes from the end of the text towards the root. It does not stop at the first cut: a response that
        agrees with less of the text may still have a token that ends further along.
        """
        best: Found | None = None
        spelt: list[tuple[int, bytes]] = []
        node: Node | None = self._path.node
        while node is not None and (end := min(self._path.position, node.depth)) > floor:
            for response, size in self._cuttable(node, end, fitting, exhaustive=exhaustive):
                start, ids = response.start, response.packed[: 4 * size]
                if any(start == begin and ids.startswith(known) for begin, known in spelt):
                    continue  # a response with the same first tokens was cut already
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
        """Return responses that may be cut on the edge to ``node``, newest first.

        Each comes with the number of its first tokens that ``fitting`` allows.
        """
        found = (
            (one, size)
            for one in reversed(node.through)
            if one.start < end and (size := fitting(one, len(one)))
        )
        return found if exhaustive else islice(found, _LOOKED_AT)


def with_last_response(
    longest: Callable[[float], Found | None], begins: Callable[[Response], float]
) -> Found | None:
    """Return the longest context of a session.

    A context that ends with a prompt must contain the session's last response along the text. Without this rule, the
    result could be a context in which the text of that response is a part of a prompt.

    ``begins(response)`` returns where a response begins. ``longest(since)`` returns the longest context. It takes a
    context that ends with a prompt only if the last response of the context begins at ``since`` or later. If ``since``
    is infinity, it takes no such context; if ``since`` is 0, it takes any.
    """
    found = longest(0)
    if found is None or isinstance(found[0][0], Response):
        return found
    last = longest(math.inf)
    if last is None:
        return found
    assert isinstance(last[0][0], Response)  # narrowing: contexts that end with a prompt were left out
    return longest(begins(last[0][0]))
