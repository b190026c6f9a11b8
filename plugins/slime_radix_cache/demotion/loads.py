"""Segments that were promoted (moved back to memory) for searches that have not begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime_radix_cache.index.segments import Segment
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["Loads"]


class Loads:
    """The segments that each running load has promoted and pinned, until its end or :meth:`let_go`.

    A load is a call of one of the ``load_...`` methods of ColdTrajectories.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        self._trajectories = trajectories
        self._under_way: dict[int, list[Segment]] = {}

    @contextmanager
    def begin(self) -> Iterator[list[Segment]]:
        """Yield a list for the segments that a load pins."""
        found: list[Segment] = []
        self._under_way[id(found)] = found
        try:
            yield found
        finally:
            del self._under_way[id(found)]
            self._unpin(found)

    def let_go(self) -> None:
        """Unpin all segments now. If a segment is demoted before its load ends, the load promotes it again."""
        for found in self._under_way.values():
            self._unpin(found)

    def _unpin(self, found: list[Segment]) -> None:
        for segment in found:
            self._trajectories.unpin((segment, len(segment)))
        found.clear()
