"""The range of rows of each turn in a context. A row is what an engine sends for one token."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slime_radix_cache.contracts import ConsumedTurn

__all__ = ["Stretch", "stretches_of", "version_of"]


class Stretch(NamedTuple):
    """A turn, and the range of its rows in its context: from ``first`` to before ``end``."""

    turn: ConsumedTurn
    first: int
    end: int

    @property
    def key(self) -> Hashable:
        return self.turn.prompt, self.first


def stretches_of(turns: Sequence[ConsumedTurn]) -> Iterator[Stretch]:
    """Yield the stretch of each turn. The context may keep only a part of a response."""
    first = 0
    for turn in turns:
        end = turn.start + min(turn.kept, turn.length - 1)
        yield Stretch(turn, first, end)
        first = end


def version_of(turn: ConsumedTurn) -> str | None:
    """Return the weight version that sampled all tokens of ``turn``; None if there are several, or it is unknown."""
    names = {version for version, _ in turn.versions}
    return names.pop() if len(names) == 1 else None
