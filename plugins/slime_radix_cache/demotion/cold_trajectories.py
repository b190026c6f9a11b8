"""Demotion of trajectories to a store when memory has no room, and promotion when they are used."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import anyio.lowlevel

from router_core.errors import HTTPError, RouterError, StartupError
from slime_radix_cache.contracts import ColdStore
from slime_radix_cache.demotion.demotion import Demotion
from slime_radix_cache.index.segments import Segment
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.journal.logged_trajectories import LoggedTrajectories

__all__ = ["ColdTrajectories", "StoreFailed", "TrajectoryLost"]

logger = logging.getLogger(__name__)

#: Bytes that are written to the store at once.
_BATCH_BYTES = 4 << 20
#: The first wait before a failed write is repeated; it doubles up to the last.
_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
_NOT_KEPT = "not_kept"


class StoreFailed(HTTPError):
    """Demoted trajectories cannot be read from their store now."""

    status, type, code = 503, "service_unavailable", "STORE_FAILED"


class TrajectoryLost(RouterError):
    """A recorded answer could be kept nowhere."""


class ColdTrajectories:
    """Demoted trajectories. Without a store, which is the default, nothing is demoted and all methods return at once.

    A search finds only what is in memory. So each search comes right after a call of ``load_...`` for the same text,
    ids or session, without an ``await`` between them.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        self._trajectories = trajectories
        self._store: ColdStore | None = None
        self._demotion = Demotion(trajectories)
        self._prefix = os.urandom(8)
        self._news = anyio.Event()
        self._progress = anyio.Event()
        self._failures: Counter[str] = Counter()
        self._waits = 0

    def keep_in(self, store: ColdStore) -> None:
        """Demote to ``store`` from now on, while :meth:`run` runs. Nothing may be recorded yet. Raises StartupError."""
        if isinstance(self._trajectories, LoggedTrajectories):
            raise StartupError("--trajectory-log cannot be combined with a store of demoted trajectories")
        self._store = store
        self._trajectories.demotion = self._demotion
        self._demotion.on_notice = self._news.set
        self._demotion.forget = lambda serial: store.forget([self._key(serial)])

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
        """Demote segments while the limits do not hold. Raises TrajectoryLost if the store says so."""
        store = self._store
        assert store is not None  # narrowing: keep_in() comes first
        while True:
            self._news = anyio.Event()
            self._demotion.on_notice = self._news.set
            while batch := self._trajectories.overdue(_BATCH_BYTES):
                await self._demote(store, batch)
                await anyio.lowlevel.checkpoint()
            self._advance()
            await self._news.wait()

    async def _demote(self, store: ColdStore, batch: list[tuple[Segment, str]]) -> None:
        demotion = self._demotion
        new = [demotion.record(segment) for segment, _ in batch if not demotion.is_stored(segment)]
        if new and not await self._keep(store, new):
            for segment, _ in batch:
                if demotion.may_go(segment) and not demotion.is_stored(segment):
                    self._trajectories.evict(segment, _NOT_KEPT)
        for segment, reason in batch:
            if demotion.may_go(segment) and demotion.is_stored(segment):
                demotion.demote(segment, reason)
        self._advance()

    async def _keep(self, store: ColdStore, records: list[tuple[int, bytes]]) -> bool:
        """Write ``records``; repeat it after failures. Returns False if the store's ``wait_s`` was too short."""
        pairs = [(self._key(serial), content) for serial, content in records]
        pause = _PAUSE_S
        with anyio.move_on_after(store.wait_s):
            while True:
                try:
                    await store.keep(pairs)
                except Exception as error:
                    self._failed("keep", error)
                    await anyio.sleep(pause)
                    pause = min(2 * pause, _MAX_PAUSE_S)
                    continue
                for serial, _ in records:
                    self._demotion.note_stored(serial)
                return True
        message = f"{len(records)} recorded segments could not be kept within {store.wait_s:g} s"
        if store.stops_on_loss:
            raise TrajectoryLost(f"{message}; --store-on-loss mark lets the router go on without them")
        self._failures["lost"] += 1
        if self._failures["lost"] == 1:
            logger.error("%s: their sessions are not complete (further ones are only counted)", message)
        return False

    def _failed(self, kind: str, error: Exception) -> None:
        self._failures[kind] += 1
        if self._failures[kind] == 1:
            logger.warning(
                "the store failed to %s trajectories (further failures are only counted): %r", kind, error
            )

    def _advance(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def room(self) -> None:
        """Wait while memory is much too full, at most the store's ``wait_s``. Requests call this before they begin."""
        store = self._store
        if store is None or not self._trajectories.is_crowded:
            return
        self._waits += 1
        with anyio.move_on_after(store.wait_s):
            while self._trajectories.is_crowded:
                self._news.set()
                await self._progress.wait()

    def check(self) -> None:
        """Demote if the limits do not hold. To be called after a request has ended."""
        if self._store is not None and self._trajectories.overdue(1):
            self._news.set()

    # Promotion.

    async def load_text(self, text: bytes, session: str | None) -> None:
        """Promote all that a search for ``text`` by ``session`` may meet. Raises StoreFailed."""
        if self._store is not None:
            directory = self._demotion.directory
            await self._load(lambda: [*directory.along_text(text), *self._of(session)])

    async def load_ids(self, ids: bytes, session: str | None) -> None:
        """Promote all that a search for ``ids`` (packed) by ``session`` may meet. Raises StoreFailed."""
        if self._store is not None:
            directory = self._demotion.directory
            await self._load(lambda: [*directory.along_ids(ids), *self._of(session)])

    async def load_given(self, ids: bytes, text: bytes, session: str | None) -> None:
        """Promote all that a search for ``ids`` (packed), whose text is ``text``, may meet. Raises StoreFailed."""
        if self._store is not None:
            known = self._demotion.directory
            await self._load(lambda: [*known.along_ids(ids), *known.along_text(text), *self._of(session)])

    async def load_session(self, session: str) -> None:
        """Promote all responses of ``session``, and all that counts as a candidate for one of their texts.

        Raises StoreFailed.
        """
        if self._store is None:
            return
        directory = self._demotion.directory

        def wanted() -> Iterable[int]:
            own = self._of(session)
            if own:
                return own
            texts = {text_of(one.node) for one in self._trajectories.responses_of(session)}
            return [serial for text in texts for serial in directory.along_text(text)]

        await self._load(wanted)

    def may_take(self, ids: bytes, session: str) -> bool:
        """See :meth:`Finder.may_take`. False if a part of ``session`` is demoted: it may have sent ``ids``."""
        if self._demotion.of_session(session):
            return False
        return self._trajectories.may_take(ids, session)

    def _of(self, session: str | None) -> Iterable[int]:
        return self._demotion.of_session(session) if session is not None else ()

    async def _load(self, wanted: Callable[[], Iterable[int]]) -> None:
        """Promote until nothing of what is ``wanted`` is demoted. What is promoted stays in memory until then."""
        store, demotion = self._store, self._demotion
        assert store is not None  # narrowing: the callers have checked it
        found: list[Segment] = []
        try:
            while entries := demotion.directory.with_ancestors(wanted()):
                serials = [entry.serial for entry in entries]
                try:
                    records = await store.fetch([self._key(serial) for serial in serials])
                except Exception as error:
                    self._failed("fetch", error)
                    raise StoreFailed(
                        f"the store of demoted trajectories does not answer: {error}"
                    ) from error
                demotion.promote(serials, records, found)
        finally:
            for segment in found:
                self._trajectories.unpin((segment, len(segment)))
        self.check()

    def _key(self, serial: int) -> bytes:
        return self._prefix + serial.to_bytes(8, "big")

    def as_dict(self) -> dict[str, Any]:
        """Return sizes and counters, ready for JSON; nothing without a store."""
        if self._store is None:
            return {}
        demotion = self._demotion
        return {
            "demoted": {
                "segments": len(demotion.directory),
                "demotions": dict(demotion.demoted),
                "promotions": demotion.promoted,
                "waits": self._waits,
                "failures": dict(self._failures),
            }
        }
