"""Conversations that outlive the process: each turn is written to the log before the client gets the answer's end."""

from __future__ import annotations

from slime_journal.record_log import RecordLog
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.history import History
from slime_openai.prompts.log_records import Gone, Record, Said, size_of
from slime_openai.prompts.turn_records import said_of, turn_of
from slime_openai.responses.evidence import LostSessions

__all__ = ["LoggedHistory"]


class LoggedHistory(History):
    """A history that begins with the turns in ``log``. :meth:`close` closes the log. Raises StartupError.

    Evictions are logged like additions, so the same turns are in memory after a restart. A limit that is lower than
    before the restart holds from the first new turn on.
    """

    def __init__(self, max_bytes: int, lost: LostSessions, log: RecordLog) -> None:
        super().__init__(max_bytes, lost)
        self._log = log
        self._serials: dict[Turn, int] = {}
        self._gone: list[Record] = []
        self._replayed: dict[int, Turn] | None = {}
        log.replay(self._replay)
        self._replayed = None

    async def tidy(self) -> None:
        """Rewrite a file when many of its turns are evicted. Returns when the log cannot be written any more."""
        await self._log.tidy(lambda record: False)

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def add(self, turn: Turn) -> None:
        """See History. All records are appended in one piece."""
        new = [one for one in turn.chain() if one not in self._used]  # more than one if parents were evicted
        records: list[Record] = []
        for one in reversed(new):
            self._serials[one] = self._log.number()
            parent = self._serials[one.parent] if one.parent is not None else 0
            records.append(said_of(one, self._serials[one], parent))
        super().add(turn)
        self._log.append(records + self._gone)
        self._gone = []

    def _forget(self, turn: Turn) -> None:
        if self._replayed is None:
            self._gone.append(Gone(self._serials[turn], size_of(turn.asked, turn.sampled)))
        super()._forget(turn)
        del self._serials[turn]

    def _make_room(self) -> None:
        if self._replayed is None:
            super()._make_room()

    def _replay(self, record: Record) -> None:
        replayed = self._replayed
        assert replayed is not None  # narrowing: the log is being read
        if isinstance(record, Said):
            turn = turn_of(record, replayed[record.parent] if record.parent else None)
            replayed[record.serial] = turn
            self._serials[turn] = record.serial
            super().add(turn)
        elif record.serial in replayed:  # else the turn was left out when its file was rewritten
            self._forget(replayed.pop(record.serial))
