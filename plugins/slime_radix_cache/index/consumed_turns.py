"""The turns of a context, for plugins that keep rows of its tokens."""

from __future__ import annotations

from collections.abc import Hashable

from slime_radix_cache.contracts import ConsumedTurn
from slime_radix_cache.index.segments import Context, Response, Segment, links

__all__ = ["consumed_turns"]


def consumed_turns(context: Context) -> list[ConsumedTurn]:
    """Return the turns of ``context``, in order. O(segments)."""
    chain = list(links(context))
    chain.reverse()
    turns = []
    place = 0
    for segment, kept in chain:
        if isinstance(segment, Response):
            response, prompt = _identity(segment), (_identity(segment.parent), segment.kept)
            turns.append(
                ConsumedTurn(response, prompt, place, len(segment), kept, segment.versions, segment.adapter)
            )
        place += kept
    return turns


def _identity(segment: Segment | None) -> Hashable:
    """Return ``segment``; with a store, its serial, which it keeps when it is moved to the store and back."""
    return segment.serial or segment if segment is not None else None
