"""Plans of gets and puts over all tiers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.engine.plans import InFlight, Plan
from slime_tiered_store.engine.reading import ReadOp
from slime_tiered_store.engine.sources import LowerTier, Source
from slime_tiered_store.engine.staging import Staging, usable_frames
from slime_tiered_store.engine.writing import WriteOp
from slime_tiered_store.errors import NotEnoughSpaceError, ResetMeanwhile, RowsDiffer
from slime_tiered_store.frames import CHECKSUM_BYTES, Layout
from slime_tiered_store.index import MatchResult, PathKeys, RadixNode
from slime_tiered_store.keys import SequenceMeta
from slime_tiered_store.tier import BlockKey, MemoryTier, SharedTier, Tier
from slime_tiered_store.transfers import TransferOp, TransferType

__all__ = ["GlobalCacheEngine"]


class GlobalCacheEngine:
    """Decides from which tier blocks are read, and into which tiers they are written. It does no I/O.

    A frame is the memory of one block. Frames are in the tier ``memory`` as long as it has room, else in private
    buffers. All tiers have blocks of ``layout.block_bytes``. ``losses`` collects the keys of blocks that were dropped
    from the last tier known to have them; the caller empties the list.
    """

    def __init__(
        self, layout: Layout, memory: MemoryTier, ssd: Tier | None = None, remote: SharedTier | None = None, *,
        policy: str = "lru",
    ) -> None:  # fmt: skip
        tiers: list[MemoryTier | Tier | None] = [memory, ssd, remote]
        for tier in tiers:
            if tier is not None and tier.block_bytes != layout.block_bytes:
                raise ValueError(
                    f"tier {tier.name} has blocks of {tier.block_bytes} bytes, the layout {layout.block_bytes}"
                )
        self.layout = layout
        self.losses: list[BlockKey] = []
        self._arena = memory
        size = layout.tokens_per_block
        self.cpu_cache_engine = CacheEngine(memory, size, policy)
        self.ssd_cache_engine = CacheEngine(ssd, size, policy) if ssd is not None else None
        self.remote_cache_engine = CacheEngine(remote, size, policy) if remote is not None else None
        self.staging = Staging()
        self._lower: list[LowerTier] = []
        if self.ssd_cache_engine is not None:
            self._lower.append(LowerTier(self.ssd_cache_engine, TransferType.DISK2H, TransferType.H2DISK))
        if self.remote_cache_engine is not None:
            self._lower.append(
                LowerTier(self.remote_cache_engine, TransferType.REMOTE2H, TransferType.H2REMOTE)
            )

    @property
    def cache_engines(self) -> list[CacheEngine]:
        """The engines of all tiers, memory first."""
        return [self.cpu_cache_engine, *(tier.engine for tier in self._lower)]

    def get(
        self, sequence_meta: SequenceMeta, *, without: Collection[str] = (), shared_blocks: int = 0,
        frames: Mapping[BlockKey, memoryview] | None = None,
    ) -> Plan | InFlight:  # fmt: skip
        """Plan to bring the longest known prefix into memory, and to fill the tiers that lack it.

        ``without``: names of lower tiers (SSD, remote) that are not read or written. ``shared_blocks``: the number of
        leading blocks that the remote tier says it holds, whoever wrote them. ``frames``: the ``frames`` of the
        ``InFlight`` objects that earlier calls for the same get returned.
        """
        memory = self.cpu_cache_engine
        found = memory.index.match_prefix(sequence_meta)
        if found.unready_node is not None:
            return InFlight(partial(memory.on_settled, found.unready_node))
        sources = [
            tier.source(sequence_meta, shared_blocks if tier.engine is self.remote_cache_engine else 0)
            for tier in self._lower
            if tier.engine.name not in without
        ]
        known = found.num_matched_blocks
        stop = max([known, *(source.stop for source in sources)])
        usable = usable_frames(self.layout, sequence_meta, sources, known, frames or {})
        start = known + len(usable)
        read = self.staging.reads.get(sequence_meta.key(start))
        if read is not None and any(max(source.stop, source.reach) > start for source in sources):
            return InFlight(read.subscribe, read.frames)
        for source in sources:
            if source.on_settled is not None and source.reach > stop:
                return InFlight(source.on_settled)
        plan = Plan(sequence_meta, memory, stop)
        with ExitStack() as undo:
            undo.callback(plan.release)
            leaf, _ = self._frames_to_fill(plan, found, usable)
            if leaf is not None:
                undo.callback(memory.discard, leaf)
            reads = self._reads(plan, sources, known, start, undo)
            if reads:
                op = TransferOp(TransferType.VIRTUAL, [], [])
                for each in reads:
                    op.add_predecessor(each)
                self._fill_memory(plan, leaf, op)
                if leaf is None:
                    read = self.staging.begin(sequence_meta.keys(start, stop), plan.frames[start:])
                    undo.callback(read.discard)
                    op.on_end = read.end
            for source in sources:
                match_result = source.match_result
                if match_result.num_matched_blocks == source.stop < stop and not match_result.collides:
                    self._write(plan, source.tier, match_result, undo)
            undo.pop_all()
        return plan

    def num_known(self, sequence: SequenceMeta) -> int:
        """Return the number of leading blocks that memory or one lower tier has, or is about to have."""
        found = self.cpu_cache_engine.index.match_prefix(sequence).num_matched_blocks
        return max([found, *(tier.source(sequence, 0).reach for tier in self._lower)])

    def _frames_to_fill(
        self, plan: Plan, found: MatchResult, usable: Sequence[memoryview] = ()
    ) -> tuple[RadixNode | None, list[memoryview]]:
        """Set the frames of a plan: first the blocks that the memory tier has, then frames for the missing blocks.

        Normally, the frames for missing blocks are new blocks in the memory tier. If there are ``usable`` frames (which
        another plan has read), or the memory tier is full or has other tokens under the next key, the frames for
        missing blocks are the usable frames, followed by private buffers. Return the unready leaf of the new blocks in
        memory, or None; and the memory to fill: views of one or more blocks each.
        """
        memory, ready = self.cpu_cache_engine, found.num_matched_blocks
        plan.hold(found.last_node)
        plan.frames = self.layout.frames(
            self._arena.stretches([block.id for block in found.blocks(0, ready)])
        )
        plan.outcomes[memory.name] = None
        if plan.num_blocks == ready:
            return None, []
        try:
            if found.collides or usable:
                raise NotEnoughSpaceError(memory.name, plan.num_blocks - ready, 0)
            ids = memory.take(plan.num_blocks - ready, found.last_node, partial(self._note_loss, memory))
        except NotEnoughSpaceError as full:
            # With its traceback, the error would refer to the plan, and the plan refers to the error. The frames would
            # then stay in memory until a garbage collection.
            plan.outcomes[memory.name] = full.with_traceback(None)
            plan.frames += usable
            missing, size = plan.num_blocks - len(plan.frames), self.layout.block_bytes
            buffers = [memoryview(bytearray(size)) for _ in range(missing)]
            plan.frames += buffers
            return None, buffers
        leaf = memory.insert(plan.sequence_meta, ids, found)
        plan.hold(leaf)
        stretches = self._arena.stretches(ids)
        plan.frames += self.layout.frames(stretches)
        return leaf, stretches

    def _reads(
        self, plan: Plan, sources: list[Source], known: int, start: int, undo: ExitStack
    ) -> list[TransferOp]:
        """Add the operations that read the blocks from ``start`` on, each block from the fastest tier that has it.

        Blocks from ``known`` to ``start`` are only counted: another plan has read them.
        """
        reads = []
        for source in sources:
            engine = source.tier.engine
            if (count := min(source.stop, start) - known) > 0:
                plan.reads.append((engine, count))
                known += count
            if source.stop > start:
                read = ReadOp(
                    plan, self.layout, engine, source.match_result, start, source.stop, self._note_loss
                )
                undo.callback(read.undo)
                reads.append(plan.graph.add_transfer_op(read.op(source.tier.read_type)))
                start = known = source.stop
        return reads

    def _fill_memory(self, plan: Plan, leaf: RadixNode | None, op: TransferOp) -> None:
        """Add ``op`` to ``plan``. If ``op`` ends without an error, all frames are filled, and ``leaf`` is ready."""
        memory = self.cpu_cache_engine

        def end(error: Exception | None) -> Exception | None:
            if leaf is None:
                return error
            if error is not None:
                memory.discard(leaf)
            elif not memory.set_ready(leaf, self.layout.checksums_of(plan.frames[-leaf.size() :])):
                plan.outcomes[memory.name] = ResetMeanwhile(memory.name)
                return None
            else:
                for engine, count in plan.reads:
                    engine.num_promoted_blocks += count
            plan.outcomes[memory.name] = error
            return error

        op.on_end = end
        plan.graph.task_end_op = plan.graph.add_transfer_op(op)

    def put(
        self, sequence_meta: SequenceMeta, rows: memoryview, checksums: bytes | None = None, *,
        without: Collection[str] = (),
    ) -> Plan | InFlight:  # fmt: skip
        """Plan to copy rows into memory, and to write them to each lower tier that lacks them.

        ``rows``: ``layout.bytes_per_token`` bytes a token, which must not change before ``graph.on_ready`` is called.
        ``checksums``: the result of ``layout.checksums(rows)``, if it is known.
        Blocks that a tier has are not written again. A tier without room is left out: its outcome is the error.

        Raises ``RowsDiffer`` when a tier has other rows for these tokens, ``ValueError`` for another number of bytes.
        """
        num_bytes = sequence_meta.num_tokens * self.layout.bytes_per_token
        if rows.nbytes != num_bytes:
            raise ValueError(
                f"{sequence_meta.num_tokens} tokens have {num_bytes} bytes of rows, got {rows.nbytes}"
            )
        rows = rows.cast("B")
        memory, checksums = self.cpu_cache_engine, checksums or self.layout.checksums(rows)
        found = memory.index.match_prefix(sequence_meta)
        tiers = [tier for tier in self._lower if tier.engine.name not in without]
        matches = [tier.engine.index.match_prefix(sequence_meta) for tier in tiers]
        for engine, match_result in zip(
            (memory, *(tier.engine for tier in tiers)), (found, *matches), strict=True
        ):
            if match_result.unready_node is not None:
                return InFlight(partial(engine.on_settled, match_result.unready_node))
            self._check_rows(engine, match_result, checksums)
        plan = Plan(sequence_meta, memory, sequence_meta.num_blocks)
        with ExitStack() as undo:
            undo.callback(plan.release)
            leaf, unfilled = self._frames_to_fill(plan, found)
            if leaf is not None:
                undo.callback(memory.discard, leaf)
            if unfilled:
                start = found.num_matched_blocks
                copy = partial(self.layout.write, unfilled, sequence_meta, start, checksums, rows)
                op = TransferOp(TransferType.D2H, [], [], work=copy, num_bytes=rows.nbytes)
                self._fill_memory(plan, leaf, op)
            for tier, match_result in zip(tiers, matches, strict=True):
                self._write(plan, tier, match_result, undo)
            undo.pop_all()
        return plan

    def _check_rows(self, engine: CacheEngine, match_result: MatchResult, checksums: bytes) -> None:
        if match_result.collides:
            raise RowsDiffer(engine.name, match_result.num_matched_blocks)
        known = match_result.checksums()
        if not checksums.startswith(known):
            same = range(0, len(known), CHECKSUM_BYTES)
            first = next(
                at for at in same if known[at : at + CHECKSUM_BYTES] != checksums[at : at + CHECKSUM_BYTES]
            )
            raise RowsDiffer(engine.name, first // CHECKSUM_BYTES)

    def _write(self, plan: Plan, tier: LowerTier, match_result: MatchResult, undo: ExitStack) -> None:
        """Add the operation that writes the blocks that a lower tier lacks, if there are any."""
        plan.outcomes[tier.engine.name] = None
        if match_result.num_matched_blocks == plan.num_blocks:
            return
        try:
            write = WriteOp(plan, self.layout, tier.engine, match_result, self._note_loss)
        except NotEnoughSpaceError as full:
            plan.outcomes[tier.engine.name] = full
            return
        undo.callback(write.undo)
        op = write.op(tier.write_type)
        if plan.graph.task_end_op is not None:
            op.add_predecessor(plan.graph.task_end_op)
        plan.graph.add_transfer_op(op)

    def is_crowded(self, sequence_meta: SequenceMeta) -> bool:
        """Return True if a put would leave out a lower tier that has room once transfers have ended."""
        return any(tier.engine.is_crowded(sequence_meta) for tier in self._lower)

    def reset(self) -> None:
        """Forget all known blocks in all tiers. Plans under way end as usual, and leave nothing behind."""
        for engine in self.cache_engines:
            engine.reset()

    def _note_loss(self, engine: CacheEngine, node: RadixNode, start: int) -> None:
        """Add to ``losses`` the keys of blocks of ``node``, from ``start`` on, that no other tier is known to have."""
        path = PathKeys(node)
        others = [other for other in self.cache_engines if other is not engine]
        held = max((other.index.num_ready(path.key, len(path)) for other in others), default=0)
        for key in map(path.key, range(max(len(path) - node.size() + start, held), len(path))):
            if not any(key in other.recovered for other in others):
                self.losses.append(key)
