"""A handler that formats each record once, and collects the lines that may wait, to write many of them at once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Event, Lock, Thread

__all__ = ["Lines"]

#: Longest time in seconds that a line waits, and largest number of lines that wait.
_WAIT_S = 0.1
_MAX_WAITING = 10_000


class Lines(logging.Handler):
    """Formats a record, and gives the line to each of ``targets``, whose own formatters are replaced.

    The line of a record with ``may_wait`` (in ``extra``) is written by a thread, together with the other lines of the
    last 0.1 s. Any other line is written at once, after the lines that wait. So the lines keep their order, and a
    process that is killed loses only lines that wait. ``flush`` and ``close`` write these lines; logging calls both at
    the end of the process.
    """

    def __init__(self, form: logging.Formatter, targets: Sequence[logging.Handler]) -> None:
        super().__init__()
        self.setFormatter(form)
        self._targets = targets
        for target in targets:
            target.setFormatter(logging.Formatter("%(message)s"))
        self._waiting: deque[str] = deque()
        self._writing = Lock()
        self._has_news, self._ended = Event(), Event()
        self._thread: Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of ``record``, or let it wait."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._waiting.append(line)
        if (
            not getattr(record, "may_wait", False)
            or len(self._waiting) > _MAX_WAITING
            or self._ended.is_set()
        ):
            self.flush()
        elif not self._has_news.is_set():
            self._has_news.set()
            if self._thread is None:
                self._thread = Thread(target=self._write, name="log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Write the lines that wait."""
        with self._writing:
            # Other threads may append meanwhile.
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if lines:
                batch = logging.makeLogRecord({"msg": "\n".join(lines)})
                for target in self._targets:
                    target.handle(batch)

    def close(self) -> None:
        """Write the lines that wait, and close the targets."""
        self._ended.set()
        self._has_news.set()
        self.flush()
        for target in self._targets:
            target.close()
        super().close()

    def _write(self) -> None:
        while self._has_news.wait() and not self._ended.wait(_WAIT_S):
            self._has_news.clear()  # before the lines are taken: a line that comes later sets it again
            self.flush()
