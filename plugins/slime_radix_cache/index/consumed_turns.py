"""The turns in a context: what each response consumed since the response before it."""

from __future__ import annotations

from slime_radix_cache.contracts import ConsumedTurn
from slime_radix_cache.index.segments import Context, Response, links

__all__ = ["consumed_turns"]


def consumed_turns(context: Context) -> list[ConsumedTurn]:
    """Return the turns of ``context``, first one first. O(segments)."""
    chain = list(links(context))
    chain.reverse()
    turns = []
    place = 0
    for segment, kept in chain:
        if isinstance(segment, Response):
            prompt = segment.parent, segment.kept
            turns.append(
                ConsumedTurn(segment, prompt, place, len(segment), kept, segment.versions, segment.adapter)
            )
        place += kept
    return turns
