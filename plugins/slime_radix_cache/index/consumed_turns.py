"""The turns in a context: what each response consumed since the response before it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from slime_radix_cache.index.segments import Context, Response, Versions, links

__all__ = ["ConsumedTurn", "consumed_turns"]


class ConsumedTurn(NamedTuple):
    """One response in a context. Places and lengths are in tokens.

    ``response``: its identity. ``prompt``: equal for responses to the same prompt. ``start``: place of its first token.
    ``length``: its tokens, of which the context keeps the first ``kept``. ``versions``: see Response.
    """

    response: Hashable
    prompt: Hashable
    start: int
    length: int
    kept: int
    versions: Versions


def consumed_turns(context: Context) -> list[ConsumedTurn]:
    """Return the turns of ``context``, first one first. O(segments)."""
    chain = list(links(context))
    chain.reverse()
    turns = []
    place = 0
    for segment, kept in chain:
        if isinstance(segment, Response):
            prompt = segment.parent, segment.kept
            turns.append(ConsumedTurn(segment, prompt, place, len(segment), kept, segment.versions))
        place += kept
    return turns
