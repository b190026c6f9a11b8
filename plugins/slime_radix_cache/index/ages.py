"""Linked list of segments by the time of their last use."""

from __future__ import annotations

from collections.abc import Iterable

from slime_radix_cache.index.segments import Segment

__all__ = ["Ages"]


class Ages:
    """All segments that may be evicted, oldest first, linked by ``older`` and ``newer``. O(1) for each segment.

    Whenever a segment is appended, its ancestors are appended after it, or are pinned and so not in the list. So a
    segment is always older than its parent, and the oldest segment is a leaf.
    """

    def __init__(self) -> None:
        self.oldest: Segment | None = None
        self._newest: Segment | None = None

    def append(self, segments: Iterable[Segment]) -> None:
        """Add ``segments``, each as the newest."""
        newest = self._newest
        for segment in segments:
            segment.older = newest
            if newest is None:
                self.oldest = segment
            else:
                newest.newer = segment
            newest = segment
        self._newest = newest

    def remove(self, segments: Iterable[Segment]) -> None:
        """Remove ``segments``."""
        for segment in segments:
            older, newer = segment.older, segment.newer
            if older is None:
                self.oldest = newer
            else:
                older.newer = newer
            if newer is None:
                self._newest = older
            else:
                newer.older = older
            segment.older = segment.newer = None
