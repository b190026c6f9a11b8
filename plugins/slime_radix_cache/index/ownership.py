"""Contexts that a session may use: its own contexts, contexts that it continued, or any context.

A response belongs to the session of its request. Another session may begin a branch with the context that ends with
this response; then the response's tokens have mask 1 for that session, too. A request begins a branch if its text
does not begin with an earlier prompt of the request's session. Text that a client sends after the branch's beginning
counts as prompt, even if another session sampled the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from slime_radix_cache.index.segments import Context, Prompt, Response, Segment, last_sampled, links

__all__ = ["ContextFilter", "SpellingCheck", "any_context", "continued_by", "inherited", "owned_by"]

#: Returns how many of a segment's first tokens may be used, with the context before them. Arguments: the segment, and
#: the number of its tokens that match.
ContextFilter: TypeAlias = Callable[[Segment, int], int]


class SpellingCheck:
    """A check, for a request of ``session``, of recorded prompts that clients gave as ids.

    A prompt that another client gave is used only if the tokenizer makes the same ids of its text. ``unknown`` collects
    the prompts that are not compared with the tokenizer yet.
    """

    def __init__(self, session: str | None) -> None:
        self.unknown: list[Prompt] = []
        self._session = session

    def allows(self, prompt: Prompt) -> bool:
        """Return True if the tokens of ``prompt`` may be used for its text."""
        giver = prompt.giver
        if giver is None or giver.is_odd is False:
            return True
        if self._session in giver.sessions:
            return True
        if giver.is_odd is None:
            self.unknown.append(prompt)
        return False


def owned_by(session: str, check: SpellingCheck | None = None) -> ContextFilter:
    """Return a filter for contexts whose last response belongs to ``session``."""

    def fitting(segment: Segment, length: int) -> int:
        here: Segment | None = segment
        while not isinstance(here, Response):
            if here is None or not _allowed(here, check):
                return 0
            here = here.parent
        return length if here.session == session and segment.is_fact else 0

    return fitting


def any_context(check: SpellingCheck | None = None) -> ContextFilter:
    """Return a filter for all contexts without contradictions."""

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
    """Return a filter for contexts whose last response is in ``kept``.

    ``kept``: for each response, how many of its first tokens may be used. The filter also allows contexts of only
    prompts, in which no token is sampled. Prompts before a response in ``kept`` need no ``check``: they were sent for
    this session before.
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
    """Return the responses in ``contexts``, each with the largest number of its tokens in any one context."""
    kept: dict[Response, int] = {}
    for context in contexts:
        for segment, length in links(context):
            if isinstance(segment, Response):
                kept[segment] = max(length, kept.get(segment, 0))
    return kept


def _allowed(segment: Segment, check: SpellingCheck | None) -> bool:
    return check is None or not isinstance(segment, Prompt) or check.allows(segment)
