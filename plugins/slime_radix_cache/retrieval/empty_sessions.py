"""The error for a session without a kept response."""

from __future__ import annotations

from router_core.errors import SessionNotFound
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["nothing_kept"]


def nothing_kept(trajectories: Trajectories, session: str) -> SessionNotFound:
    """Return the error for ``session``, which has no kept response in ``trajectories``. Its message says why."""
    if trajectories.has_lost(session):
        why = "its responses were evicted or not recorded (GET /cache_stats says why)"
    elif trajectories.is_running(session):
        why = "its first response is not complete yet; ask again when it is"
    else:
        why = "no response is recorded under this name; check the name"
    return SessionNotFound(f"nothing is kept of session {session!r}: {why}")
