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
from slime_tiered_store.keys import key_at
from slime_tiered_store.note_log import NoteLog
from slime_tiered_store.tier import Block, MemoryTier, SharedTier, Tier

__all__ = ["Move", "move_to"]

logger = logging.getLogger(__name__)

#: The number of blocks that are copied together. These blocks have about 1 MiB.
_AT_ONCE = 256
#: Longest time between two attempts, in seconds.
_PAUSE_S = 60.0


class Move:
    """Copies to ``home`` the blocks that earlier runs left in ``tier`` and that ``home`` lacks.

    ``engine`` is the engine of ``tier``. It evicts nothing until all blocks are copied, since some may be in no other
    tier. ``log``: the log of ``home``. ``latest``: the latest run in the log of ``tier``. A copy that fails is repeated
    until it succeeds, so nothing is lost while ``home`` is full or fails. Damaged blocks are left out and logged.
    """

    def __init__(
        self, engine: CacheEngine, tier: Tier, home: SharedTier, log: NoteLog, latest: bytes
    ) -> None:
        engine.evicts = False
        self._engine = engine
        # The keys are needed, too: if a block is forgotten meanwhile, the read of its slot reports the key as missing.
        self._keys, self._slots = b"".join(engine.recovered), array("q", engine.recovered.ids())
        self._tier = tier
        self._home = home
        self._log = log
        self._latest = latest
        self._steps: list[Callable[[], Awaitable[None]]] = []
        #: The damaged blocks of ``tier`` that ``home`` does not have.
        self._damaged: dict[Block, BlockCorrupt] = {}
        self._has_begun = anyio.Event()

    @property
    def source(self) -> str:
        """The name of the tier whose blocks are copied."""
        return self._engine.name

    async def begin(self, opening: Iterable[bytes], closing: bytes) -> None:
        """Write ``opening`` as the notes of a further run, and let :meth:`run` begin to copy. Raises TierFailed.

        The last note of the further run is ``closing``, which is written after the last copy.
        """
        log = self._log.beside(self._latest)
        for content in opening:
            await log.append(content)
        self._steps = [partial(log.append, closing), partial(self._log.note_copies_of, self._latest)]
        self._has_begun.set()

    async def run(self) -> None:
        """Wait for :meth:`begin`, copy all blocks, record in the log that they are copied, then let the tier evict."""
        await self._has_begun.wait()
        slots, tier, home = self._slots, self._tier.name, self._home.name
        logger.info("copying %d blocks of earlier runs from tier %s to tier %s", len(slots), tier, home)
        for start in range(0, len(slots), _AT_ONCE):
            places = range(start, min(start + _AT_ONCE, len(slots)))
            blocks = [Block(slots[place], key_at(self._keys, place)) for place in places]
            await self._again(partial(self._copy, blocks))
        self._log_damage()
        for step in self._steps:
            await self._again(step)
        self._engine.evicts = True
        if self._damaged:
            logger.info(
                "tier %s has the intact blocks of earlier runs that were in tier %s; %d blocks were damaged",
                home,
                tier,
                len(self._damaged),
            )
        else:
            logger.info("tier %s has all blocks of earlier runs that were in tier %s", home, tier)

    def _log_damage(self) -> None:
        if self._damaged:
            logger.error(
                "%d of %d blocks of earlier runs are damaged, and cannot be copied to tier %s: "
                "records with these blocks are lost, and counted when they are needed; the first: %s",
                len(self._damaged),
                len(self._slots),
                self._home.name,
                next(iter(self._damaged.values())),
            )

    async def _copy(self, blocks: Sequence[Block]) -> None:
        held = await self._home.holds([block.key for block in blocks])
        there, frames, damaged = await self._read(blocks[held:], self._tier.block_bytes)
        await self._home.write(there, frames)
        # Blocks that were forgotten during the copy are deleted from the home. Blocks that only the second read finds
        # damaged stay in the home: they were intact when they were copied.
        still_there, _, damaged_since = await self._read(there, 0)
        self._home.forget(list(set(there).difference(still_there, damaged_since)))
        for block, error in damaged.items():
            if not await self._home.holds([block.key]):  # an earlier run may have copied the block
                self._damaged[block] = error

    async def _read(
        self, blocks: Sequence[Block], size: int
    ) -> tuple[list[Block], list[memoryview], dict[Block, BlockCorrupt]]:
        """Return the intact ones of ``blocks``, the first ``size`` bytes of each, and the damaged ones.

        Forgotten blocks are left out.
        """
        there, damaged = list(blocks), dict[Block, BlockCorrupt]()
        while True:
            frames = [memoryview(bytearray(size)) for _ in there]
            try:
                await self._tier.read(there, frames)
                return there, frames, damaged
            except (BlockMissing, BlockCorrupt) as error:
                wrong = next(block for block in there if block.key == error.key)
                if isinstance(error, BlockCorrupt) and not await self._is_forgotten(wrong):
                    damaged[wrong] = error
                there.remove(wrong)

    async def _is_forgotten(self, block: Block) -> bool:
        """Return True if the tier does not know ``block`` any more.

        If a block is forgotten while it is read, another one may take its slot. Then the forgotten block seems to be
        damaged.
        """
        try:
            await self._tier.read([block], [memoryview(bytearray())])
        except BlockMissing:
            return True
        except BlockCorrupt:
            pass
        return False

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
        return None  # then only the home can have notes
    for engine, tier in tiers:
        run = latest.get(engine.name) if engine.name != home else None
        if run is not None and not isinstance(tier, MemoryTier) and not log.has_copies_of(run):
            return Move(engine, tier, to, log, run)
    return None
