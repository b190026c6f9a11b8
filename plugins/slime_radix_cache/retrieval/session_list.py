"""The list of recorded sessions, newest first."""

from __future__ import annotations

from itertools import groupby, islice

from slime_radix_cache.contracts import SessionPage, SessionSummary
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["RecordedSessions"]

#: The most names that one search compares, which takes some milliseconds.
_MAX_SEARCHED = 100_000


class RecordedSessions:
    """The component ``"session_list"``; reading it changes nothing. See ``slime_radix_cache.contracts``."""

    def __init__(self, trajectories: Trajectories, cold: ColdTrajectories) -> None:
        self._trajectories = trajectories
        self._cold = cold

    def __len__(self) -> int:
        demotion = self._cold.demotion
        return len(demotion.sessions) if demotion is not None else self._trajectories.session_count

    def page(self, search: str, offset: int, limit: int) -> SessionPage:
        """Return a part of the sessions whose names contain ``search``."""
        demotion = self._cold.demotion
        names = reversed(demotion.sessions) if demotion is not None else self._trajectories.newest_sessions()
        if search:
            names = (name for name in islice(names, _MAX_SEARCHED) if search in name)
        found = list(islice(names, offset, offset + limit + 1))
        has_more = len(found) > limit
        is_cut = bool(search) and not has_more and len(self) > _MAX_SEARCHED
        return SessionPage([self._summary(name) for name in found[:limit]], has_more, is_cut)

    def _summary(self, name: str) -> SessionSummary:
        demotion = self._cold.demotion
        if demotion is not None:
            responses = demotion.sizes_of(name)
        else:
            responses = [(one.versions, len(one)) for one in self._trajectories.responses_of(name)]
        versions = (version for runs, _ in responses for version, _ in runs)
        return SessionSummary(
            name,
            len(responses),
            sum(tokens for _, tokens in responses),
            tuple(version for version, _ in groupby(versions)),
            not self._trajectories.has_lost(name),
        )
