"""Demotion of trajectories to a store when memory has no room, and promotion when they are used."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from router_core.errors import StartupError
from slime_radix_cache.cold_store import ColdStore
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.demotion.errors import StoreFailed
from slime_radix_cache.demotion.loads import Loads
from slime_radix_cache.demotion.notes import FORMAT, RunBegun
from slime_radix_cache.demotion.open_sessions import OpenSessions
from slime_radix_cache.demotion.others import OtherRouters
from slime_radix_cache.demotion.restart import restore
from slime_radix_cache.demotion.row_notes import RowNotes
from slime_radix_cache.demotion.saving import SegmentSaver
from slime_radix_cache.demotion.side_records import SideRecords
from slime_radix_cache.index.segments import Response, Segment
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.journal.logged_trajectories import LoggedTrajectories

__all__ = ["ColdTrajectories", "StoreFailed"]

logger = logging.getLogger(__name__)

#: How many segments are saved together when the router ends.
_AT_ONCE = 1024
#: About how many bytes of segments are demoted together.
_BATCH_BYTES = 4 << 20
_NOT_KEPT = "not_kept"


class ColdTrajectories:
    """Demoted trajectories. Without a store, which is the default, nothing is demoted and all methods return at once.

    A search finds only what is in memory. So each search comes right after a call of ``load_...`` for the same text,
    ids or session, without an ``await`` between them.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        self._trajectories = trajectories
        self._store: ColdStore | None = None
        self._demotion = Demotion(trajectories)
        self.side = SideRecords(self._demotion, trajectories.losses)
        self._saver: SegmentSaver
        self._open: OpenSessions
        self._others: OtherRouters
        self.rows: RowNotes
        self._news = anyio.Event()
        self._progress = anyio.Event()
        self._loads = Loads(trajectories)
        self._waits = 0
        self._restored = 0

    @asynccontextmanager
    async def kept_in(self, store: ColdStore, tokenizer: str, tasks: TaskGroup) -> AsyncIterator[None]:
        """Restore what ``store`` has, demote to it in ``tasks``, and save all at the end if it ``keeps_notes``.

        ``tokenizer``: the tokenizer's fingerprint. Call this before anything is recorded. Raises StartupError.
        """
        if isinstance(self._trajectories, LoggedTrajectories):
            raise StartupError("--trajectory-log cannot be combined with a store of demoted trajectories")
        await self.open(store, tokenizer)
        tasks.start_soon(self._saver.writer.run)
        tasks.start_soon(self.run)
        tasks.start_soon(self._others.run)
        tasks.start_soon(self.side.run)
        try:
            yield
        finally:
            if store.keeps_notes:
                await self._close(store)

    async def open(self, store: ColdStore, tokenizer: str) -> None:
        """Restore what earlier runs demoted to ``store``. Raises StartupError."""
        demotion = self._demotion
        self._store = store
        demotion.is_shared = lambda: store.is_shared
        store.session_of = lambda key: demotion.session_of(key) or self.side.session_of(key)
        self._saver = SegmentSaver(store, demotion)
        self._open = OpenSessions(self._trajectories, demotion, self._saver.writer)
        self.side.begin(store, self._saver, self._look, self._failed)
        past = await restore(store, tokenizer, self._trajectories, demotion, self._saver.writer, self.side)
        self.rows = RowNotes(store, demotion, self._saver, past.rows)
        self._others = OtherRouters(
            store, self._trajectories, demotion, RunBegun(FORMAT, tokenizer), self.rows, self.side,
            partial(self._saver.failed, "follow"),
        )  # fmt: skip
        self._others.restore(past)
        self._restored = len(demotion.directory)
        self._trajectories.demotion = demotion
        demotion.on_notice = lambda: self._news.set()

    async def _close(self, store: ColdStore) -> None:
        """Save all that is in memory, rows last, within the store's ``wait_s``."""
        with anyio.move_on_after(store.wait_s, shield=True) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._saver.writer.run)
                await self._save_all()
                await self.side.save_all()
                self._open.end()
                await self._saver.writer.flush()
                await self.rows.save()
                tasks.cancel_scope.cancel()
        if scope.cancelled_caught:
            logger.error(
                "the store did not take all trajectories within %g s: the rest is lost", store.wait_s
            )

    async def _save_all(self) -> None:
        memory = self._demotion.memory
        unsaved = memory.unsaved(memory.serials)
        for start in range(0, len(unsaved), _AT_ONCE):
            if not await self._saver.save(unsaved[start : start + _AT_ONCE]):
                return

    @property
    def is_on(self) -> bool:
        """True if there is a store."""
        return self._store is not None

    @property
    def demotion(self) -> Demotion | None:
        """The demoted segments; None without a store."""
        return self._demotion if self._store is not None else None

    # Demotion.

    async def run(self) -> None:
        """Demote segments whenever a limit is exceeded, until cancelled. Evict those that the store does not take."""
        while True:
            self._news = anyio.Event()
            while batch := self._trajectories.overdue(_BATCH_BYTES):
                await self._demote(batch)
                await anyio.lowlevel.checkpoint()
            self._advance()
            await self._news.wait()

    async def _demote(self, batch: list[tuple[Segment, str]]) -> None:
        demotion = self._demotion
        sessions = {segment.session for segment, _ in batch if isinstance(segment, Response)}
        is_saved = await self._saver.save([segment for segment, _ in batch])
        if not is_saved:
            for segment, _ in batch:
                if demotion.may_go(segment) and not demotion.memory.is_saved(segment):
                    self._trajectories.evict(segment, _NOT_KEPT)
        await self.rows.save_of(segment for segment, _ in batch)
        if is_saved:
            await self.side.save(sessions)  # last, so that a settled session has all its records in the store
        for segment, reason in batch:
            demotion.demote(segment, reason)
        self._open.settle(sessions - self.side.unsaved_sessions)
        self._advance()

    def _advance(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def room(self) -> None:
        """Wait while memory is crowded (``is_crowded``), at most ``wait_s``. Requests call this before they begin."""
        store = self._store
        if store is None or not self._trajectories.is_crowded:
            return
        self._waits += 1
        with anyio.move_on_after(store.wait_s):
            while self._trajectories.is_crowded:
                self._news.set()
                await self._progress.wait()

    def check(self) -> None:
        """Demote if a limit is exceeded. Call this when a request has ended."""
        if self._store is not None and self._trajectories.overdue(1):
            self._news.set()

    # Promotion.

    async def load_text(self, text: bytes, session: str | None, *, asks: bool = False) -> None:
        """Promote all segments that a search for ``text`` by ``session`` may meet. Raises StoreFailed.

        ``asks``: a request of the session begins right after the search. Raises NotNoted if no note can say so.
        """
        if self._store is not None:
            known = self._demotion.directory
            if not asks:
                await self._look()
            await self._load(lambda: [*known.along_text(text), *self._of(session)], session if asks else None)

    async def load_ids(self, ids: bytes, session: str | None, *, asks: bool = False) -> None:
        """Promote all segments that a search for ``ids`` (packed) by ``session`` may meet. Raises StoreFailed."""
        if self._store is not None:
            found = lambda: [*self._demotion.directory.along_ids(ids), *self._of(session)]  # noqa: E731
            await self._load(found, session if asks else None)

    async def load_given(self, ids: bytes, text: bytes, session: str | None) -> None:
        """Promote all segments that a search for ``ids`` (packed), whose text is ``text``, may meet.

        A request of the session begins right after the search. Raises StoreFailed, NotNoted.
        """
        if self._store is not None:
            known = self._demotion.directory
            found = lambda: [*known.along_ids(ids), *known.along_text(text), *self._of(session)]  # noqa: E731
            await self._load(found, session)

    async def load_session(self, session: str) -> None:
        """Promote all responses of ``session``, and what a search for their texts may meet. Raises StoreFailed."""
        if self._store is None:
            return
        await self._look()
        directory = self._demotion.directory

        def wanted() -> Iterable[int]:
            own = self._of(session)
            if own:
                return own
            texts = {text_of(one.node) for one in self._trajectories.responses_of(session)}
            return [serial for text in texts for serial in directory.along_text(text)]

        await self._load(wanted)

    async def _look(self) -> None:
        """Read what other routers have noted. Raises StoreFailed."""
        try:
            await self._others.look()
        except Exception as error:
            raise self._failed("follow", error) from error

    def _failed(self, kind: str, error: Exception) -> StoreFailed:
        self._saver.failed(kind, error)
        return StoreFailed(f"the store of demoted trajectories does not answer: {error}")

    async def may_take(self, ids: bytes, session: str) -> bool:
        """See :meth:`Finder.may_take`. Returns False, the safe answer, if the store does not answer."""
        try:
            await self.load_ids(ids, session)
        except StoreFailed:
            return False
        return self._trajectories.may_take(ids, session)

    def forget(self, session: str) -> None:
        """See :meth:`Trajectories.forget`. Also evicts what was promoted for a search that has not begun."""
        self._loads.let_go()
        self._trajectories.forget(session)
        self.side.forget(session)
        if self._store is not None:
            self._others.forget(session)

    def _of(self, session: str | None) -> Iterable[int]:
        return self._demotion.of_session(session) if session is not None else ()

    async def _load(self, wanted: Callable[[], Iterable[int]], asking: str | None = None) -> None:
        """Promote segments until ``wanted()`` returns no demoted serial. They stay in memory until the call ends.

        ``asking``: a session whose request begins right after this call.
        """
        store, demotion = self._store, self._demotion
        assert store is not None  # narrowing: the callers have checked it
        with self._loads.begin() as found:
            while True:
                if asking is not None and asking not in self._open and store.keeps_notes:
                    # Before any read: the request goes on if a read fails, and then the log must have its session.
                    await self._open.begin(asking)
                entries = demotion.directory.with_ancestors(wanted())
                if not entries:
                    break
                serials = [entry.serial for entry in entries]
                try:
                    records = await store.fetch([demotion.runs.key(serial) for serial in serials])
                except Exception as error:
                    raise self._failed("fetch", error) from error
                demotion.promote(serials, records, found)
        self.check()

    def as_dict(self) -> dict[str, Any]:
        """Return sizes and counters, ready for JSON; empty without a store."""
        if self._store is None:
            return {}
        demotion = self._demotion
        return {
            "demoted": {
                "segments": len(demotion.directory),
                "chat_turns": len(self.side),
                "restored": self._restored,
                "demotions": dict(demotion.demoted),
                "promotions": demotion.promoted,
                "waits": self._waits,
                "failures": dict(self._saver.failures),
            }
        }
