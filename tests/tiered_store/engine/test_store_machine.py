"""The engine of the store against a plain model: transfers end in any order, fail, and are aborted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slime_tiered_store.engine import CacheEngine, GlobalCacheEngine, InFlight, Plan
from slime_tiered_store.errors import BlockCorrupt, BlockMissing, TierFailed, TierFull
from slime_tiered_store.frames import Layout
from slime_tiered_store.index import POLICIES
from slime_tiered_store.keys import Namespace, SequenceMeta
from slime_tiered_store.tier import Block, BlockKey
from slime_tiered_store.transfers import TransferOp, TransferScheduler, TransferType
from tiered_store.plain_tiers import PlainMemory, PlainShared, PlainTier

LAYOUT = Layout(2, 3)
ROOT = Namespace("m").root_key(2, 3)
TOKENS = st.lists(st.integers(0, 1), max_size=9).map(tuple)
Frames: TypeAlias = Mapping[BlockKey, memoryview]
READS = (TransferType.DISK2H, TransferType.REMOTE2H)


def rows(tokens: tuple[int, ...]) -> bytes:
    """Rows that depend on the whole prefix, so that a block in a wrong place is seen."""
    return b"".join(bytes([token, at, sum(tokens[: at + 1])]) for at, token in enumerate(tokens))


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.sampled_from(((0, 6, 8), (3, 5, 8), (4, 4, 4), (200, 200, 200))),
        policy=st.sampled_from(sorted(POLICIES)),
        left=st.lists(TOKENS, max_size=2),
    )
    def begin(self, sizes: tuple[int, int, int], policy: str, left: list[tuple[int, ...]]) -> None:
        size = LAYOUT.block_bytes
        self.memory = PlainMemory(size, sizes[0])
        self.lower = {"ssd": PlainTier(size, sizes[1]), "remote": PlainShared(size, sizes[2])}
        ssd, remote = self.lower["ssd"], self.lower["remote"]
        assert isinstance(remote, PlainShared)
        self.ever_put: set[tuple[int, ...]] = {()}
        for tokens in left:
            self.leave(ssd, tokens)
        self.engine = GlobalCacheEngine(LAYOUT, self.memory, ssd, remote, policy=policy)
        self.scheduler = TransferScheduler()
        self.running: list[TransferOp] = []
        self.borrowed: list[Plan] = []
        self.again: list[Callable[[], None]] = []
        self.waiting = 0
        self.plans: list[Plan] = []
        self.ends: dict[int, list[str]] = {}
        self.damaged: set[tuple[str, int]] = set()
        self.stored: set[tuple[int, ...]] = set()
        self.is_ample = sizes[0] == 200

    def leave(self, tier: PlainTier, tokens: tuple[int, ...]) -> None:
        """Write blocks as an earlier process did."""
        sequence, data = SequenceMeta(ROOT, tokens, 2), memoryview(rows(tokens))
        memory = memoryview(bytearray(LAYOUT.block_bytes * sequence.num_blocks))
        if tokens:
            LAYOUT.write([memory], sequence, 0, LAYOUT.checksums(data), data)
        for block, frame in enumerate(LAYOUT.frames([memory])[: tier.capacity - len(tier.left)]):
            slot = tier.left.setdefault(sequence.key(block), len(tier.left))
            tier.write_now([Block(slot, sequence.key(block))], [frame])
        self.ever_put.update(tokens[:end] for end in range(len(tokens) + 1))

    def plan(
        self,
        make: Callable[[Frames], Plan | InFlight],
        use: Callable[[Plan], None],
        frames: Frames | None = None,
    ) -> None:
        """Make a plan and submit it, now or when the blocks that it waits for have settled."""
        frames = frames or {}
        found = make(frames)
        if isinstance(found, InFlight):
            self.waiting += 1

            def retry() -> None:
                self.waiting -= 1
                self.plan(make, use, {**frames, **found.frames})

            found.subscribe(lambda: self.again.append(retry))
            return
        told = self.ends[id(found)] = list[str]()
        self.plans.append(found)  # so that its id stays its own
        found.graph.on_ready = lambda: told.append("ready")
        found.graph.on_complete = lambda: told.append("end")
        found.graph.on_abort = lambda error: told.append("end")
        use(found)
        self.scheduler.submit(found.graph)
        self.start()

    def start(self) -> None:
        self.running += self.scheduler.next_ops()

    def settle(self) -> None:
        while self.again:
            self.again.pop(0)()
        self.start()

    @rule(tokens=TOKENS)
    def put(self, tokens: tuple[int, ...]) -> None:
        sequence = SequenceMeta(ROOT, tokens, 2)

        def use(plan: Plan) -> None:
            self.ever_put.update(tokens[:end] for end in range(len(tokens) + 1))

            def complete() -> None:
                if plan.outcomes["memory"] is None and self.is_ample:
                    self.stored.add(tokens)
                plan.release()

            plan.graph.on_complete = _then(plan.graph.on_complete, complete)
            plan.graph.on_abort = _then(plan.graph.on_abort, plan.release)

        self.plan(lambda frames: self.engine.put(sequence, memoryview(rows(tokens))), use)
        self.settle()

    @rule(tokens=TOKENS, without=st.sampled_from(((), ("ssd",), ("remote",))), shared=st.booleans())
    def get(self, tokens: tuple[int, ...], without: tuple[str, ...], shared: bool) -> None:
        sequence = SequenceMeta(ROOT, tokens, 2)

        def use(plan: Plan) -> None:
            if tokens in self.stored and not without:
                assert plan.num_blocks == sequence.num_blocks
            plan.graph.on_ready = _then(plan.graph.on_ready, lambda: self.ready(plan, tokens))
            plan.graph.on_abort = _then(plan.graph.on_abort, lambda: self.failed(plan))

        def make(frames: Frames) -> Plan | InFlight:
            held = sequence.num_blocks if shared else 0
            for at in range(held):
                if int.from_bytes(sequence.key(at)) not in self.lower["remote"].slots:
                    held = at
                    break
            return self.engine.get(sequence, without=without, shared_blocks=held, frames=frames)

        self.plan(make, use)
        self.settle()

    def ready(self, plan: Plan, tokens: tuple[int, ...]) -> None:
        found = b"".join(bytes(LAYOUT.rows(frame)) for frame in plan.frames)
        prefix = tokens[: plan.sequence_meta.length(plan.num_blocks)]
        assert found == rows(prefix)
        assert prefix in self.ever_put
        self.borrowed.append(plan)

    def failed(self, plan: Plan) -> None:
        if plan not in self.borrowed:
            plan.release()

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        plan = self.borrowed.pop(data.draw(st.integers(0, len(self.borrowed) - 1)))
        prefix = plan.sequence_meta.token_bytes[: 4 * plan.sequence_meta.length(plan.num_blocks) : 4]
        assert b"".join(bytes(LAYOUT.rows(frame)) for frame in plan.frames) == rows(tuple(prefix))
        plan.release()
        plan.release()
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fault=st.sampled_from((None, None, None, "failed", "full", "missing", "corrupt")))
    def finish(self, data: st.DataObject, fault: str | None) -> None:
        op = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.end(op, fault)
        self.settle()

    def end(self, op: TransferOp, fault: str | None) -> None:
        name = "remote" if "REMOTE" in op.transfer_type.name else "ssd"
        tier = self.lower[name]
        error: Exception | None = None
        if fault == "failed" or (fault == "full" and op.transfer_type in READS):
            error = TierFailed(name, "move", "/disk", "EIO")
        elif op.transfer_type in READS:
            if fault in ("missing", "corrupt"):
                self.spoil(tier, op.blocks[-1], fault)
            try:
                tier.read_now(op.blocks, op.buffers)
                if op.work is not None:
                    op.work()
            except (BlockMissing, BlockCorrupt) as wrong:
                error = wrong
        elif op.transfer_type is TransferType.D2H:
            if op.work is not None:
                op.work()
        else:
            done = op.blocks[: len(op.blocks) // 2] if fault else op.blocks
            tier.write_now(done, op.buffers[: len(done)])
            self.damaged -= {(name, tier.place(block)) for block in done}
            error = TierFull(name, 1, 0) if fault == "full" else None
            if fault in ("missing", "corrupt"):
                error = TierFailed(name, "write", "/disk", "short write")
        blocks, is_read = op.blocks, op.transfer_type in READS
        self.scheduler.finish(op, error)
        self.start()
        if is_read and fault in ("missing", "corrupt"):
            lower = next(engine for engine in self.engine.cache_engines if engine.name == name)
            known = {block for node in lower.index.nodes() for block in node.blocks() if node.is_ready}
            assert blocks[-1] not in known

    def spoil(self, tier: PlainTier, block: Block, fault: str) -> None:
        self.stored.clear()
        place = tier.place(block)
        self.damaged.add((tier.name, place))
        if fault == "missing":
            tier.slots.pop(place, None)
        elif place in tier.slots:
            key, data = tier.slots[place]
            # the first token: what follows the rows of a short block is undefined
            tier.slots[place] = (key, data[:32] + bytes([data[32] ^ 1]) + data[33:])

    @precondition(lambda self: self.scheduler.graphs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        graph = data.draw(st.sampled_from(list(self.scheduler.graphs)))
        self.scheduler.abort(graph, TierFailed("ssd", "move", "/disk", "aborted"))
        self.settle()

    @rule()
    def reset(self) -> None:
        self.engine.reset()
        self.stored.clear()
        self.settle()

    @rule(tokens=TOKENS)
    def forget(self, tokens: tuple[int, ...]) -> None:
        for engine in self.engine.cache_engines:
            engine.forget(SequenceMeta(ROOT, tokens, 2))
        self.stored.clear()
        self.settle()

    @rule(tier=st.integers(0, 2), count=st.integers(1, 3))
    def evict(self, tier: int, count: int) -> None:
        engine = self.engine.cache_engines[tier]
        engine.recycle_blocks(engine.index.evict(count))
        self.stored.clear()

    @invariant()
    def each_id_has_one_owner(self) -> None:
        if not hasattr(self, "engine"):
            return
        for engine in self.engine.cache_engines:
            owned = engine.index.num_blocks + len(engine.recovered)
            assert engine.mempool.num_used_blocks >= owned
            ids = [block for node in engine.index.nodes() for block in node.physical_blocks]
            assert len(ids) == len(set(ids)) <= engine.index.num_blocks
            for node in engine.index.nodes():
                if node.is_ready:
                    self.check_bytes(engine, node.blocks())

    def check_bytes(self, engine: CacheEngine, blocks: list[Block]) -> None:
        """Each ready block's bytes hash to its key, unless the test damaged them since."""
        for block in blocks:
            if engine.name == "memory":
                (frame,) = self.memory.stretches([block.id])
            else:
                tier = self.lower[engine.name]
                place = tier.place(block)
                if (engine.name, place) in self.damaged:
                    continue
                key, data = tier.slots[place]
                assert key == block.key
                frame = memoryview(data)
            count = int.from_bytes(frame[24:28], "little")
            LAYOUT.verify(engine.name, frame, block.key, bytes(frame[32 : 32 + 4 * count]))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.running or self.again:
            if self.running:
                self.end(self.running.pop(0), None)
            self.settle()
        for plan in self.borrowed:
            plan.release()
        self.settle()
        assert not self.scheduler.graphs
        assert self.waiting == 0
        assert self.engine.staging.reads == {}
        for told in self.ends.values():
            assert told.count("end") == 1
            assert told.count("ready") <= 1
        for engine in self.engine.cache_engines:
            nodes = list(engine.index.nodes())
            assert all(node.is_ready and not node.lock_cnt for node in nodes)
            assert engine.index.num_evictable_blocks == engine.index.num_blocks
            used = sum(node.size() for node in nodes) + len(engine.recovered)
            assert used == engine.mempool.num_used_blocks
        self.each_id_has_one_owner()


def _then(first: Callable[..., None], second: Callable[[], None]) -> Callable[..., None]:
    def both(*arguments: object) -> None:
        first(*arguments)
        second()

    return both


TestStoreMachine = StoreMachine.TestCase
#: Half as many again as of other tests; `--hypothesis-profile thorough` tries more.
_EXAMPLES = settings().max_examples * 3 // 2
TestStoreMachine.settings = settings(max_examples=_EXAMPLES, stateful_step_count=40, deadline=None)
