"""Responses that have several records; some of these records may be demoted. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from slime_radix_cache.demotion.numbered import NumberedSegments
from slime_radix_cache.index.longer_records import LongerRecords
from slime_radix_cache.index.segments import Response, Segment
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["GrownRecords"]


class GrownRecords:
    """The records of each response that was recorded first only in part, then with more tokens.

    ``serials``: the serials of these records, demoted or not. ``on_grown(part, whole)`` is called with the serials of
    two records of a response that were not known to belong together.
    """

    def __init__(self, trajectories: Trajectories, memory: NumberedSegments) -> None:
        self.serials: LongerRecords[int] = LongerRecords(int)
        self.on_grown: Callable[[int, int], None] = lambda part, whole: None
        self._trajectories = trajectories
        self._memory = memory

    def note(self, segment: Segment) -> None:
        """Note those records of the response of ``segment`` that are in memory, each with the next longer record."""
        if isinstance(segment, Response):
            serials = [self._memory.serials[one] for one in self._trajectories.longer.all_of(segment)]
            for part, whole in pairwise(serials):
                if self.serials.add(part, whole):
                    self.on_grown(part, whole)

    def removed(self, segment: Segment, serial: int) -> None:
        """Do :meth:`note` before ``segment`` is removed for good, so that the other records stay together."""
        if len(self.serials.all_of(serial)) > 1:
            self.note(segment)

    def learn(self, part: int, whole: int) -> None:
        """Note that another router has recorded the response ``part`` again as ``whole``, with more tokens."""
        self.serials.add(part, whole)
        self.connect(part)

    def renew(self, serial: int, new: int) -> None:
        """Note that a record of a response has the serial ``new`` instead of ``serial``."""
        other = next((one for one in self.serials.all_of(serial) if one != serial), None)
        self.serials.remove(serial)
        if other is not None:
            self.serials.add(new, other)
            self.on_grown(new, other)

    def connect(self, serial: int) -> None:
        """Connect those records of a response that are in memory. ``serial``: of any record of the response."""
        records = map(self._memory.segments.get, self.serials.all_of(serial))
        for part, whole in pairwise(one for one in records if isinstance(one, Response)):
            self._trajectories.longer.add(part, whole)
