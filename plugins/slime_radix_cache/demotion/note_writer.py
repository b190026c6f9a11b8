"""Writer of notes to the store's log, in the order in which they are added.

Notes that come during a write are written together in the next write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from router_core.errors import HTTPError
from slime_radix_cache.cold_store import ColdStore
from slime_radix_cache.demotion.notes import Dropped, DroppedRows, packed

__all__ = ["NotNoted", "NoteWriter"]

#: The first and the longest wait, in seconds, before a failed write is repeated. Waits double up to the longest.
_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
#: Longest time that a request waits for a note, in seconds.
_WAIT_S = 5.0


class NotNoted(HTTPError):
    """A request is refused, since a note about it cannot be written to the log now.

    Without that note, a router that starts after a kill could take an earlier answer for the latest. ``known``: what
    the store has. ``news``: what must be noted about that.
    """

    status, type, code = 503, "service_unavailable", "STORE_FAILED"
    headers = ((b"retry-after", b"1"),)  # the request has waited already

    def __init__(self, known: str, news: str) -> None:
        super().__init__(
            f"the store has {known}, and must note that {news}; "
            f"that was not possible within {_WAIT_S:g} s: try again"
        )


class NoteWriter:
    """Writes notes to the log of ``store``. If the store has no log, notes count as written at once.

    The store forgets the records of a Dropped or DroppedRows note only after the note is written: no record is dropped
    before the log says so. ``failed`` is called with each error of the store.
    """

    def __init__(self, store: ColdStore, failed: Callable[[Exception], None]) -> None:
        self._store = store
        self._failed = failed
        self._pending: list[Any] = []
        #: The notes that are being written, and their bytes. After a failure the same bytes must be written again.
        self._batch: list[Any] = []
        self._content = b""
        #: How many notes were added, and how many of them are written.
        self.added = self.written = 0
        self._news = anyio.Event()
        self._progress = anyio.Event()

    def add(self, *notes: Any) -> None:
        """Add ``notes``, to be written by :meth:`run` soon."""
        self.added += len(notes)
        self._pending += notes
        self._news.set()

    async def flush(self) -> None:
        """Wait until all notes that were added are written. This needs :meth:`run` in another task."""
        wanted = self.added
        while self.written < wanted:
            await self._progress.wait()

    async def flushed(self) -> bool:
        """Return True when all notes that were added are written. Return False after the longest wait of a request."""
        with anyio.move_on_after(_WAIT_S):
            await self.flush()
            return True
        return False

    async def run(self) -> None:
        """Write notes, until cancelled. A failed write is repeated."""
        pause = _PAUSE_S
        while True:
            self._news = anyio.Event()
            if not self._batch and not self._pending:
                await self._news.wait()
                continue
            try:
                await self._write()
            except Exception as error:
                self._failed(error)
                await anyio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_S)
            else:
                pause = _PAUSE_S

    async def _write(self) -> None:
        if not self._batch:
            self._content = packed(self._pending) if self._store.keeps_notes else b""
            self._batch, self._pending = self._pending, []
        if self._store.keeps_notes:
            await self._store.note(self._content)
        self._store.forget([key for note in self._batch for key in _dropped_by(note)])
        self.written += len(self._batch)
        self._batch = []
        self._progress.set()
        self._progress = anyio.Event()


def _dropped_by(note: Any) -> Sequence[bytes]:
    """Return the keys of the records that are not needed after ``note``."""
    if isinstance(note, DroppedRows):
        return note.keys
    return (note.key,) if isinstance(note, Dropped) else ()
