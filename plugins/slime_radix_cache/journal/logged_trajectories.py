"""Trajectories that outlive the process: each method writes its changes to the log before it returns.

If the log was given up, the changes are not written; the sessions of unwritten answers are marked as lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_journal.record_log import RecordLog
from slime_radix_cache.index.losses import Losses
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Context, Giver, Response, Segment, prior_response
from slime_radix_cache.index.sessions import Running
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.text_search import Around, Cut
from slime_radix_cache.index.trajectories import Limits, Trajectories
from slime_radix_cache.journal.log_records import Answered, Asked, Gone, Record, Seen
from slime_radix_cache.journal.segment_records import sampled_from, segment_record, text_from
from slime_radix_cache.journal.unfinished import UnansweredSessions

__all__ = ["LoggedTrajectories"]


@dataclass(slots=True)
class _Replay:
    """State of the replay of the log. ``serial``: the serial of the current record."""

    serial: int = 0
    segments: dict[int, Segment] = field(default_factory=dict)


class LoggedTrajectories(Trajectories):
    """Trajectories restored from ``log``, which this object owns. Raises StartupError.

    The log has each addition and each removal of a segment, in order. So a replay decides nothing: it repeats the
    logged changes, and restores all segments that were not removed. A replay enforces no limits; the next recorded
    answer does.
    """

    def __init__(
        self,
        limits: Limits,
        cut: Cut,
        log: RecordLog,
        around: Around = lambda text, position: None,
        losses: Losses | None = None,
        unanswered: UnansweredSessions | None = None,
    ) -> None:
        super().__init__(limits, cut, around, losses)
        self.log = log
        self._unanswered = unanswered
        self._serials: dict[Segment, int] = {}
        self._logged_versions: set[str] = set()
        #: Key: the serial of a response. Value: among the responses that came next after that response in the same
        #: session, the serial of the one that was evicted last.
        self._last_gone: dict[int, int] = {}
        self._unwritten: list[Record] = []
        self._replay: _Replay | None = _Replay()
        log.replay(self._replay_record)
        self._replay = None
        kept = set(self._serials.values())
        self._last_gone = {one: serial for one, serial in self._last_gone.items() if one in kept}

    async def tidy(self) -> None:
        """Compact the log from time to time."""
        await self.log.tidy(self._must_stay)

    def _must_stay(self, record: Record) -> bool:
        """Return True if a compaction must keep ``record``: a version, or the last loss after a response."""
        if not isinstance(record, Gone):
            return isinstance(record, Seen)
        return record.serial == self._last_gone.get(record.before)

    def close(self) -> None:
        """Close the log."""
        self.log.close()

    # Requests without an answer are not logged; a file has digests of their sessions.

    def begin(self, running: Running) -> None:
        """See Trajectories."""
        super().begin(running)
        if self._unanswered is not None:
            self._unanswered.begin(running.session)

    def end(self, running: Running, *, is_recorded: bool) -> None:
        """See Trajectories."""
        super().end(running, is_recorded=is_recorded)
        if self._unanswered is not None:
            is_remembered = running.session in self._sessions.unanswered
            self._unanswered.end(running.session, is_remembered=is_remembered)

    def _forget(self, session: str) -> None:
        super()._forget(session)
        if self._unanswered is not None and session not in self._sessions.unanswered:
            self._unanswered.forget(session)

    # Changes: each is written as it is made.

    def record(
        self,
        context: Context,
        prompt_ids: bytes,
        prompt: bytes,
        sampled: Sampled,
        session: str | None = None,
        giver: Giver | None = None,
        again: Response | None = None,
        instead_of: Response | None = None,
        known: Node | None = None,
    ) -> Response:
        """See Trajectories. One write has the response and the evictions: a kill leaves both or neither."""
        response = super().record(
            context, prompt_ids, prompt, sampled, session, giver, again, instead_of, known
        )
        self._write()
        return response

    def withdraw(self, part: Response) -> None:
        """See Trajectories."""
        super().withdraw(part)
        self._write()

    def forget(self, session: str) -> None:
        """See Trajectories."""
        super().forget(session)
        self._write()

    def see_version(self, version: str) -> None:
        """See Trajectories."""
        super().see_version(version)
        self._write()

    def _write(self) -> None:
        if self._unwritten:
            self.log.append(self._unwritten)
            if self.log.is_given_up:
                self._lose_unwritten()
            self._unwritten = []

    def _lose_unwritten(self) -> None:
        """Mark each session with an answer that is not in the log: such an answer is lost when the process ends."""
        for record in self._unwritten:
            if isinstance(record, Answered):
                self.lose(record.session, b"")

    # What a change adds, removes or evicts; each becomes a record of the next write.

    def _add(self, segment: Segment, overhead: int) -> None:
        super()._add(segment, overhead)
        if self._replay is not None:
            self._serials[segment] = self._replay.serial
            self._replay.segments[self._replay.serial] = segment
        else:
            self._serials[segment] = self.log.number()
            self._unwritten.append(segment_record(segment, self._serials, self._parts_of(segment)))

    def _parts_of(self, segment: Segment) -> tuple[int, ...]:
        parts = self.longer.parts_of(segment) if isinstance(segment, Response) else ()
        return tuple(self._serials[part] for part in parts)

    def _remove(self, segment: Segment) -> None:
        super()._remove(segment)
        serial = self._serials.pop(segment)
        self._last_gone.pop(serial, None)
        if self._replay is None:
            self._unwritten.append(Gone(serial, len(segment), evicted=False, session=None, before=0))

    def _evict(self, segment: Segment) -> None:
        serial = self._serials[segment]
        super()._evict(segment)
        session = segment.session if isinstance(segment, Response) else None
        before = prior_response(segment) if isinstance(segment, Response) else None
        place = self._serials[before] if before is not None else 0
        if place:
            self._last_gone[place] = serial
        if self._replay is None:
            self._unwritten[-1] = Gone(serial, len(segment), evicted=True, session=session, before=place)

    def _see(self, version: str) -> None:
        super()._see(version)
        if version not in self._logged_versions:
            self._logged_versions.add(version)
            if self._replay is None:
                self._unwritten.append(Seen(version))

    # Replay of the log.

    def _replay_record(self, record: Record) -> None:
        if isinstance(record, Asked | Answered):
            self._replay_addition(record)
        elif isinstance(record, Gone):
            self._replay_removal(record)
        else:
            self._see(record.version)

    def _replay_addition(self, record: Asked | Answered) -> None:
        replay = self._replay
        assert replay is not None  # narrowing: the log is being read
        parent = replay.segments[record.parent] if record.parent else None
        context: Context = (parent, record.kept) if parent is not None else None
        text = text_from(record, parent)
        replay.serial = record.serial
        self.pin(context)  # the context counts as used, even if all answers to it were removed
        if isinstance(record, Asked):
            giver = Giver(record.giver) if record.giver is not None else None
            self._prompt(context, record.ids, text, record.doubt, giver)
        else:
            response = self.record(
                context, b"", text[: record.start], sampled_from(record, text), record.session
            )
            for serial in record.parts:
                part = replay.segments.get(serial)
                if isinstance(part, Response):
                    self.longer.add(part, response)
        self.unpin(context)

    def _replay_removal(self, record: Gone) -> None:
        replay = self._replay
        assert replay is not None  # narrowing: the log is being read
        segment = replay.segments.pop(record.serial, None)
        if segment is not None:
            self._evict(segment) if record.evicted else self._remove(segment)
            return
        if record.session is not None:  # the log was compacted: it has the loss, but not the segment
            self.losses.sessions.add(record.session)
            before = replay.segments.get(record.before)
            if isinstance(before, Response):
                self._last_gone[record.before] = record.serial
                before.continuation_lost = True

    def _keep_to_limits(self, newest: Segment | None = None) -> None:
        if self._replay is None:
            super()._keep_to_limits(newest)
