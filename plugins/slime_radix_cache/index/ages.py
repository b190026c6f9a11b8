"""Linked list of segments by the time of their last use."""

from __future__ import annotations

from slime_radix_cache.index.segments import Segment

__all__ = ["Ages"]


class Ages:
    """All segments that may be evicted, oldest first, linked by ``older`` and ``newer``. Each operation is O(1).

    A segment's ancestors are added or refreshed right after it. So a segment is always older than its parent, and the
    oldest segment is a leaf.
    """

    def __init__(self) -> None:
        self.oldest: Segment | None = None
        self._newest: Segment | None = None

    def append(self, segment: Segment) -> None:
        """Add ``segment`` as the newest."""
        segment.older = self._newest
        if self._newest is None:
            self.oldest = segment
        else:
            self._newest.newer = segment
        self._newest = segment

    def remove(self, segment: Segment) -> None:
        """Remove ``segment``."""
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
