"""Sessions that would be incomplete after a kill of the router."""

from __future__ import annotations

from collections.abc import Iterable

from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.note_writer import NoteWriter, NotNoted
from slime_radix_cache.demotion.notes import Begun, Ended, Settled, Unanswered
from slime_radix_cache.index.trajectories import Trajectories

__all__ = ["OpenSessions"]


class OpenSessions:
    """Sessions that may have responses in memory only. :meth:`begin` notes a session before its requests begin."""

    def __init__(self, trajectories: Trajectories, demotion: Demotion, writer: NoteWriter) -> None:
        self._trajectories = trajectories
        self._demotion = demotion
        self._writer = writer
        self._open: set[str] = set()
        #: Open sessions whose requests need not wait for the note: it is written, or a request has waited too long.
        self._noted: set[str] = set()

    def __contains__(self, session: str) -> bool:
        return session in self._noted

    async def begin(self, session: str) -> None:
        """Open ``session``, and wait until the log says so.

        If that takes too long, and the log cannot have notes about the session yet, the session is marked as lost. Its
        request can begin, since this note will be the first one about the session in the log. If the log may have notes
        about the session, raises NotNoted: without the new note, the log would still call the session settled.
        """
        if session not in self._open:
            self._open.add(session)
            self._writer.add(Begun(session))
        is_written = await self._writer.flushed()
        if not is_written and session not in self._noted:  # else another request has noted it meanwhile
            losses = self._trajectories.losses
            if session in self._demotion.sessions or session in losses:
                raise NotNoted("answers of this session", "the session goes on")
            losses.sessions.add(session)
        if session in self._open:  # else it was settled meanwhile
            self._noted.add(session)

    def settle(self, sessions: Iterable[str | None]) -> None:
        """Note which of ``sessions`` have all responses in the store, and no request without an answer."""
        for session in self._open.intersection(sessions):
            if session not in self._trajectories.sessions.unanswered:
                self._settle(session)

    def _settle(self, session: str) -> None:
        if not self._demotion.memory.has_unsaved(session) and not self._trajectories.is_running(session):
            self._open.remove(session)
            self._noted.discard(session)
            self._writer.add(Settled(session))

    def end(self) -> None:
        """Note what is known of all sessions at the end of the router."""
        self._writer.add(*map(Unanswered, self._trajectories.sessions.unanswered.sessions()))
        for session in list(self._open):
            self._settle(session)
        if not self._open and not self._demotion.memory.unsaved(self._demotion.memory.serials):
            self._writer.add(Ended())
