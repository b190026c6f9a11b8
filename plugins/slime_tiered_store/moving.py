"""Copies blocks of earlier runs from the tier that was their home to the home of this run (see ColdRecords)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import anyio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, StoreError
from slime_tiered_store.note_log import NoteLog
from slime_tiered_store.tier import Block, MemoryTier, SharedTier, Tier

__all__ = ["Move", "move_to"]

logger = logging.getLogger(__name__)

#: Blocks that are copied together: about 1 MiB.
_AT_ONCE = 256
#: Longest time between two attempts, in seconds.
_PAUSE_S = 60.0


class Move:
    """Copies the blocks that earlier runs left in ``tier`` to ``home``, unless ``home`` has them.

    ``engine`` is the engine of ``tier``. It evicts nothing until all blocks are copied, since some may be in no other
    tier. ``log``: the log of ``home``. ``latest``: the latest run in the log of ``tier``. A call that fails is repeated
    until it succeeds, so nothing is lost while ``home`` is full or fails.
    """

    def __init__(
        self, engine: CacheEngine, tier: Tier, home: SharedTier, log: NoteLog, latest: bytes
    ) -> None:
        engine.evicts = False
        self._engine = engine
        # Keys as well as slots: if a block is forgotten meanwhile, the read reports its key as missing.
        self._keys, self._slots = b"".join(engine.recovered), array("q", engine.recovered.ids())
        self._tier = tier
        self._home = home
        self._log = log
        self._latest = latest
        self._steps: list[Callable[[], Awaitable[None]]] = []
        self._has_begun = anyio.Event()

    @property
    def source(self) -> str:
        """The name of the tier whose blocks are copied."""
        return self._engine.name

    async def begin(self, opening: Iterable[bytes], closing: bytes) -> None:
        """Write the notes ``opening`` as a run of their own, and let :meth:`run` go on. Raises TierFailed.

        The run ends with the note ``closing``, which is written after the last copy.
        """
        log = self._log.beside(self._latest)
        for content in opening:
            await log.append(content)
        self._steps = [partial(log.append, closing), partial(self._log.note_copies_of, self._latest)]
        self._has_begun.set()

    async def run(self) -> None:
        """Wait for :meth:`begin`, copy all blocks, then let the tier evict again."""
        await self._has_begun.wait()
        slots, tier, home = self._slots, self._tier.name, self._home.name
        logger.info("copying %d blocks of earlier runs from tier %s to tier %s", len(slots), tier, home)
        for start in range(0, len(slots), _AT_ONCE):
            places = range(start, min(start + _AT_ONCE, len(slots)))
            blocks = [Block(slots[place], self._keys[16 * place : 16 * place + 16]) for place in places]
            await self._again(partial(self._copy, blocks))
        for step in self._steps:
            await self._again(step)
        self._engine.evicts = True
        logger.info("tier %s has all blocks of earlier runs that were in tier %s", home, tier)

    async def _copy(self, blocks: Sequence[Block]) -> None:
        held = await self._home.holds([block.key for block in blocks])
        there, frames = await self._read(blocks[held:], self._tier.block_bytes)
        await self._home.write(there, frames)
        still_there, _ = await self._read(there, 0)
        self._home.forget(list(set(there).difference(still_there)))

    async def _read(self, blocks: Sequence[Block], size: int) -> tuple[list[Block], list[memoryview]]:
        """Return those of ``blocks`` that are neither forgotten nor lost, each with its first ``size`` bytes."""
        there = list(blocks)
        while True:
            frames = [memoryview(bytearray(size)) for _ in there]
            try:
                await self._tier.read(there, frames)
            except (BlockMissing, BlockCorrupt) as gone:
                there = [block for block in there if block.key != gone.key]
            else:
                return there, frames

    async def _again(self, call: Callable[[], Awaitable[None]]) -> None:
        again = AsyncRetrying(
            wait=wait_exponential(max=_PAUSE_S),
            retry=retry_if_exception_type(StoreError),
            sleep=anyio.sleep,
            before_sleep=self._warn,
        )
        await again(call)

    def _warn(self, state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            logger.warning(
                "tier %s evicts nothing until its blocks are copied to tier %s: %s",
                self._tier.name,
                self._home.name,
                state.outcome.exception(),
            )


def move_to(
    home: str,
    tiers: Sequence[tuple[CacheEngine, Tier | MemoryTier]],
    log: NoteLog,
    latest: Mapping[str, bytes],
) -> Move | None:
    """Return the move to the tier ``home``, whose log is ``log``, from the tier that was the home of earlier runs.

    ``latest``: the latest run in the log of each tier, by tier name. A tier without notes has no entry. Returns None if
    there is nothing to move.
    """
    to = next(tier for engine, tier in tiers if engine.name == home)
    if not isinstance(to, SharedTier):
        return None  # then no tier but the home can have notes
    for engine, tier in tiers:
        run = latest.get(engine.name) if engine.name != home else None
        if run is not None and not isinstance(tier, MemoryTier) and not log.has_copies_of(run):
            return Move(engine, tier, to, log, run)
    return None
