"""Contexts that a session may take: its own, those that it continued, or any.

A response belongs to the session that asked for it. Another session may continue its context in the first request of a
branch; the tokens count as continued from then on. What it writes later is its client's text, whoever sampled the like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from slime_radix_cache.index.segments import Context, Prompt, Response, Segment, last_sampled, links

__all__ = ["ContextFilter", "SpellingCheck", "anybodys", "continued_by", "inherited", "owned_by"]

#: Returns the number of a segment's first tokens that may be taken, with all before them; 0: none. Arguments: the
#: segment, and the number of its tokens that fit.
ContextFilter: TypeAlias = Callable[[Segment, int], int]


class SpellingCheck:
    """Tokens that a client gave as ids are not sent for another client's text, unless the tokenizer spells it so.

    ``unknown`` collects the prompts that only the tokenizer can decide about.
    """

    def __init__(self, session: str | None) -> None:
        self.unknown: list[Prompt] = []
        self._session = session

    def allows(self, prompt: Prompt) -> bool:
        """True when the tokens of ``prompt`` may stand for its text."""
        giver = prompt.giver
        if giver is None or giver.is_odd is False:
            return True
        if self._session in giver.sessions:
            return True
        if giver.is_odd is None:
            self.unknown.append(prompt)
        return False


def owned_by(session: str, check: SpellingCheck | None = None) -> ContextFilter:
    """Contexts of which ``session`` sampled the last response."""

    def fitting(segment: Segment, length: int) -> int:
        here: Segment | None = segment
        while not isinstance(here, Response):
            if here is None or not _allowed(here, check):
                return 0
            here = here.parent
        return length if here.session == session and segment.is_fact else 0

    return fitting


def anybodys(check: SpellingCheck | None = None) -> ContextFilter:
    """All contexts."""

    def fitting(segment: Segment, length: int) -> int:
        if not segment.is_fact:
            return 0
        here: Segment | None = segment if check is not None else None
        while here is not None:
            if not _allowed(here, check):
                return 0
            here = here.parent
        return length

    return fitting


def inherited(kept: Mapping[Response, int], check: SpellingCheck | None = None) -> ContextFilter:
    """Contexts whose last response is one of ``kept``, with no more of its tokens than that; and prompts alone.

    Prompts alone say nothing in anybody's name. Those before a response in ``kept`` were sent for the session before.
    """

    def fitting(segment: Segment, length: int) -> int:
        if not segment.is_fact:
            return 0
        if isinstance(segment, Response):
            return min(length, kept.get(segment, 0))
        last = last_sampled((segment, length))
        if last is not None and last[1] > kept.get(last[0], 0):
            return 0
        here: Segment | None = segment
        while here is not None and not isinstance(here, Response):
            if not _allowed(here, check):
                return 0
            here = here.parent
        return length

    return fitting


def continued_by(contexts: Iterable[Context]) -> dict[Response, int]:
    """The responses in ``contexts``, and how many tokens of each are in one of them."""
    kept: dict[Response, int] = {}
    for context in contexts:
        for segment, length in links(context):
            if isinstance(segment, Response):
                kept[segment] = max(length, kept.get(segment, 0))
    return kept


def _allowed(segment: Segment, check: SpellingCheck | None) -> bool:
    return check is None or not isinstance(segment, Prompt) or check.allows(segment)
