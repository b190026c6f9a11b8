"""Runs of a router with a store of demoted trajectories, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from radix_cache.direct import generate
from radix_cache.shelf import Shelf
from radix_cache.toy import sampled, trajectories
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.trajectories import Limits, Trajectories

__all__ = ["SMALL", "Run", "run_on"]

SMALL = Limits(tokens=1)


class Run:
    """Trajectories of one run of a router."""

    def __init__(self, kept: Trajectories, cold: ColdTrajectories, shelf: Shelf) -> None:
        self.kept = kept
        self.cold = cold
        self.shelf = shelf

    async def settled(self) -> None:
        """Wait until no limit is exceeded, and all is written."""
        self.cold.check()
        with anyio.fail_after(5):
            while self.kept.overdue(1):
                await anyio.lowlevel.checkpoint()
            await self.cold._saver.writer.flush()

    async def turn(self, text: str, *ids: int, session: str | None = "s") -> None:
        """One turn as a router does it."""
        await self.cold.load_text(text.encode(), session, asks=True)
        generate(self.kept, text, sampled(*ids, version="7"), session)
        self.cold.check()

    async def promote_all(self) -> None:
        await self.cold._load(lambda: list(self.cold._demotion.directory._entries))


@asynccontextmanager
async def run_on(shelf: Shelf, limits: Limits | None = None, tokenizer: str = "toy") -> AsyncIterator[Run]:
    kept = trajectories(limits)
    cold = ColdTrajectories(kept)
    async with anyio.create_task_group() as tasks:
        try:
            async with cold.kept_in(shelf, tokenizer, tasks):
                yield Run(kept, cold, shelf)
        finally:
            tasks.cancel_scope.cancel()
