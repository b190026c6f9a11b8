"""The plan of one get or put."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.index import RadixNode
from slime_tiered_store.keys import SequenceMeta
from slime_tiered_store.tier import BlockKey
from slime_tiered_store.transfers import TransferOpGraph

__all__ = ["InFlight", "Plan"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """Blocks that a plan needs are on their way already. Plan again when the callback given to ``subscribe`` is called.

    The callback is called once, when the transfer of the blocks has ended or failed. ``frames`` then has the bytes, by
    key, of blocks that were read although the memory tier has no room for them. The next plan uses these frames, so
    that each block is read only once.
    """

    subscribe: Callable[[Callable[[], None]], None]
    frames: Mapping[BlockKey, memoryview] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Plan:
    """Transfers to submit, and their results.

    ``num_blocks``: the number of leading blocks of ``sequence_meta`` that the plan covers. ``frames``: the bytes of
    each block, valid from ``graph.on_ready`` until ``release``. ``outcomes``: None or an error for each written tier,
    by its name. Outcomes of lower tiers are known when the graph ends. ``reads``: engines of lower tiers, each with
    the number of blocks that are read from it.

    Submit ``graph`` once, and call ``release`` once, in any case. Both are needed to free what the plan holds.
    """

    sequence_meta: SequenceMeta
    memory: CacheEngine
    num_blocks: int = 0
    frames: list[memoryview] = field(default_factory=list)
    outcomes: dict[str, Exception | None] = field(default_factory=dict)
    reads: list[tuple[CacheEngine, int]] = field(default_factory=list)
    graph: TransferOpGraph = field(default_factory=TransferOpGraph)
    node: RadixNode | None = None

    def hold(self, node: RadixNode) -> None:
        """Lock ``node``, which has the memory of the frames, until ``release``. Unlock the node of an earlier call."""
        self.memory.index.lock(node)
        self.release()
        self.node = node

    def lock(self) -> RadixNode:
        """Lock the memory of the frames for one transfer, and return the node to unlock."""
        if self.node is None:
            raise ValueError("this plan has been released")
        self.memory.index.lock(self.node)
        return self.node

    def count_hits(self) -> None:
        """Count the blocks as hits of the tiers that had them."""
        read = sum(count for _, count in self.reads)
        for engine, count in (*self.reads, (self.memory, self.num_blocks - read)):
            engine.num_hit_blocks += count

    def release(self) -> None:
        """Unlock the memory of the frames. A second call does nothing."""
        if self.node is not None:
            node, self.node = self.node, None
            self.memory.unlock_node(node)
