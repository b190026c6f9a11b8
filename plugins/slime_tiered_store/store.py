"""The store: rows of tokens in memory, on SSD and in a remote store."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy.typing as npt
from anyio import CancelScope, Event, Lock, create_task_group, move_on_after

from slime_tiered_store.engine import GlobalCacheEngine, InFlight, Plan
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, NotStored, StoreError, TierFailed
from slime_tiered_store.frames import Layout
from slime_tiered_store.keys import Namespace, SequenceMeta
from slime_tiered_store.off_loop import run_work
from slime_tiered_store.tier import Block, BlockKey, MemoryTier, SharedTier, Tier
from slime_tiered_store.transfers import TransferExecutor, TransferType

__all__ = ["PutResult", "StoredRows", "TieredStore"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PutResult:
    """The outcome of a put in each tier, by the tier's name: None if all rows are stored, else the error."""

    outcomes: Mapping[str, Exception | None]

    def is_stored(self, tier: str) -> bool:
        """Return True when the tier has all rows. An SSD or remote tier has them durably."""
        return tier in self.outcomes and self.outcomes[tier] is None


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of the first ``num_tokens`` tokens, as the store has them in memory, without a copy.

    ``pieces``: the rows of each block, ``bytes_per_token`` bytes a token. Valid within the
    ``async with`` of :meth:`TieredStore.borrow`.
    """

    num_tokens: int
    pieces: list[memoryview]


class TieredStore:
    """Keeps rows, ``layout.bytes_per_token`` bytes for each token of a sequence, in up to three tiers.

    Rows may depend only on the namespace and the tokens: equal tokens with other rows raise ``RowsDiffer``. The
    caller closes the tiers, after the store. The SSD and the remote tier are the *lower* tiers. A put waits up to
    ``wait_s`` seconds while transfers use the room of a lower tier, then leaves out that tier. ``on_loss(keys)`` is
    called with the keys of blocks that were dropped from the last tier known to hold them. Make all calls in the event
    loop that entered the store. An example::

        layout = Layout(tokens_per_block=64, bytes_per_token=16)
        async with TieredStore(layout, memory, ssd) as store:
            namespace = Namespace("qwen3", weight_version="7", variant="0")
            result = await store.put(namespace, token_ids, rows)  # len(rows) == 16 * len(token_ids)
            assert result.is_stored("ssd")
            kept = await store.get(namespace, token_ids)  # the rows of the longest known prefix, 16 bytes a token

    A call may be cancelled at any time; transfers that it began go on. A cancelled put ends only when no transfer reads
    the caller's rows any more. The end of the ``async with`` waits for transfers.
    """

    def __init__(
        self, layout: Layout, memory: MemoryTier, ssd: Tier | None = None, remote: SharedTier | None = None, *,
        policy: str = "lru", wait_s: float = 30.0, on_loss: Callable[[list[BlockKey]], None] | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.engine = GlobalCacheEngine(layout, memory, ssd, remote, policy=policy)
        self._remote = remote
        self._wait_s = wait_s
        self._line = Lock()
        self._on_loss = on_loss
        self._stack = AsyncExitStack()
        self._executor: TransferExecutor | None = None
        self._tiers: dict[TransferType, Tier] = {}
        if ssd is not None:
            self._tiers |= {TransferType.H2DISK: ssd, TransferType.DISK2H: ssd}
        if remote is not None:
            self._tiers |= {TransferType.H2REMOTE: remote, TransferType.REMOTE2H: remote}

    async def __aenter__(self) -> Self:
        task_group = await self._stack.enter_async_context(create_task_group())
        self._executor = TransferExecutor(self._tiers, task_group)
        return self

    async def __aexit__(self, *of_the_body: object) -> None:
        self._executor = None
        # An error of the body is not given to the task group, which would wrap it and cancel transfers.
        await self._stack.__aexit__(None, None, None)

    def sequence_meta(self, namespace: Namespace, token_ids: npt.ArrayLike) -> SequenceMeta:
        """Return tokens with their block keys."""
        size = self.layout.tokens_per_block
        return SequenceMeta(namespace.root_key(size, self.layout.bytes_per_token), token_ids, size)

    async def put(
        self, namespace: Namespace, token_ids: npt.ArrayLike, rows: bytes | memoryview
    ) -> PutResult:
        """Store the rows of ``token_ids``, and return when each tier has them or has refused them.

        ``rows``: ``bytes_per_token * len(token_ids)`` bytes. They must not change before the call returns.
        If another call is writing some of the blocks, this call waits until that write ends. If that write fails, this
        call writes the blocks.
        Raises ``RowsDiffer``, ``NotStored`` when no tier took the rows, ``ValueError`` for bad tokens or sizes.
        """
        sequence_meta, view = self.sequence_meta(namespace, token_ids), memoryview(rows).cast("B")
        checksums = await run_work(view.nbytes, partial(self.layout.checksums, view))
        await self._room_for(sequence_meta)
        while isinstance(plan := self._engine_of_open_store().put(sequence_meta, view, checksums), InFlight):
            await self._settled(plan)
            await self._room_for(sequence_meta)
        await self._run(plan, release=True)
        if all(error is not None for error in plan.outcomes.values()):
            raise NotStored(plan.outcomes)
        return PutResult(plan.outcomes)

    async def get(self, namespace: Namespace, token_ids: npt.ArrayLike) -> bytes:
        """Return the rows of the longest stored prefix: ``bytes_per_token`` bytes for each of its tokens.

        The prefix has all tokens, or ends at the end of a block. Returns ``b""`` if no prefix is stored.
        Copying long rows holds the GIL; ``borrow`` does not copy.
        Raises ``TierFailed`` when a tier that may have a longer prefix cannot be read. An error is never a miss.
        """
        async with self.borrow(namespace, token_ids) as rows:
            return await run_work(sum(map(len, rows.pieces)), partial(b"".join, rows.pieces))

    @asynccontextmanager
    async def borrow(self, namespace: Namespace, token_ids: npt.ArrayLike) -> AsyncIterator[StoredRows]:
        """Give the rows of ``get`` without a copy. They stay in memory until the end of the ``async with``."""
        plan = await self._fetch(self.sequence_meta(namespace, token_ids))
        try:
            pieces = [self.layout.rows(frame) for frame in plan.frames]
            yield StoredRows(plan.sequence_meta.length(plan.num_blocks), pieces)
        finally:
            plan.release()

    async def holds(self, namespace: Namespace, token_ids: npt.ArrayLike) -> bool:
        """Return True if all rows of ``token_ids`` seem to be in tiers. Reads no rows. Raises ``TierFailed``."""
        sequence = self.sequence_meta(namespace, token_ids)
        known = self._engine_of_open_store().num_known(sequence)
        return known == sequence.num_blocks or await self._shared_blocks(sequence) == sequence.num_blocks

    def forget(self, namespace: Namespace, token_ids: npt.ArrayLike) -> None:
        """Forget the rows of ``token_ids``, and all rows that continue them, in all tiers.

        Rows on their way to a tier are forgotten when they arrive. Rows that continue ``token_ids`` stay if an earlier
        process left them and this process has not read them. They are not found until ``token_ids`` are stored again.
        """
        sequence_meta = self.sequence_meta(namespace, token_ids)
        shared = self.engine.remote_cache_engine
        if (
            shared is not None and self._remote is not None
        ):  # the index does not know blocks that an earlier process wrote
            known = shared.index.match_prefix(sequence_meta, update_cache_info=False).num_matched_blocks
            self._remote.forget(
                [Block(0, key) for key in sequence_meta.keys(known, sequence_meta.num_blocks)]
            )
        for engine in self.engine.cache_engines:
            engine.forget(sequence_meta)

    def reset(self) -> None:
        """Forget all blocks that this process knows, in all tiers."""
        self.engine.reset()

    async def _fetch(self, sequence_meta: SequenceMeta) -> Plan:
        """Return a plan whose frames are in memory. A tier that fails is left out if others have its blocks."""
        failed: dict[str, StoreError] = {}
        promised, shared_blocks = 0, 0
        frames: dict[BlockKey, memoryview] = {}
        try:
            shared_blocks = await self._shared_blocks(sequence_meta)
        except TierFailed as failure:
            failed[failure.tier], promised = failure, sequence_meta.num_blocks
        while True:
            plan = self._engine_of_open_store().get(
                sequence_meta, without=failed, shared_blocks=shared_blocks, frames=frames
            )
            if isinstance(plan, InFlight):
                await self._settled(plan)
                frames.update(plan.frames)
                continue
            error = await self._run(plan, release=False)
            if error is None:
                if plan.num_blocks < promised:
                    plan.release()
                    raise next(iter(failed.values()))
                plan.count_hits()
                return plan
            plan.release()
            if isinstance(error, BlockMissing | BlockCorrupt):
                logger.warning("A stored block is missing or corrupt: %s", error)
                keys = sequence_meta.keys(0, sequence_meta.num_blocks)
                shared_blocks = min(shared_blocks, keys.index(error.key))
            elif isinstance(error, TierFailed) and error.tier not in failed:
                failed[error.tier], promised = error, max(promised, plan.num_blocks)
            else:
                raise error

    async def _shared_blocks(self, sequence_meta: SequenceMeta) -> int:
        """Return the number of leading blocks that an index has, plus that of the next blocks in the remote tier.

        Return 0 if there is no remote tier, or if an index has all blocks, so that the remote tier need not be asked.
        """
        ready = max(
            engine.index.num_ready(sequence_meta.key, sequence_meta.num_blocks)
            for engine in self.engine.cache_engines
        )
        if self._remote is None or ready == sequence_meta.num_blocks:
            return 0
        return ready + await self._remote.holds(sequence_meta.keys(ready, sequence_meta.num_blocks))

    async def _room_for(self, sequence_meta: SequenceMeta) -> None:
        """Wait in line, for ``wait_s`` at most, while transfers use the room of a lower tier."""
        with move_on_after(self._wait_s):
            async with self._line:
                while self._executor is not None and self.engine.is_crowded(sequence_meta):
                    await self._executor.next_end()

    def _engine_of_open_store(self) -> GlobalCacheEngine:
        if self._executor is None:
            raise RuntimeError("the store is not open: use it within `async with`")
        return self.engine

    async def _settled(self, in_flight: InFlight) -> None:
        settled = Event()
        in_flight.subscribe(settled.set)
        await settled.wait()

    async def _run(self, plan: Plan, release: bool) -> Exception | None:
        """Submit a plan, and wait until its frames are ready. Return the error of a transfer, or None.

        If ``release`` is True, release the plan at once, and wait until all its transfers have ended.
        """
        assert self._executor is not None  # narrowing: the store was open just now, when the plan was made
        done, copied, errors = Event(), Event(), list[Exception]()

        def abort(error: Exception) -> None:
            copied.set()
            if not done.is_set():  # else the data was ready, and only a copy to a lower tier failed
                errors.append(error)
                done.set()

        plan.graph.on_complete, plan.graph.on_abort = done.set, abort
        plan.graph.on_ready = copied.set if release else done.set
        try:
            self._executor.submit(plan.graph)
            if release:
                plan.release()
            try:
                self._report_losses()
                await done.wait()
            finally:
                if (
                    release and not copied.is_set()
                ):  # the thread that reads the caller's rows cannot be cancelled
                    with CancelScope(shield=True):
                        await copied.wait()
        except BaseException:
            plan.release()
            raise
        self._report_losses()
        return errors[0] if errors else None

    def _report_losses(self) -> None:
        losses, self.engine.losses = self.engine.losses, []
        if losses and self._on_loss is not None:
            self._on_loss(losses)
