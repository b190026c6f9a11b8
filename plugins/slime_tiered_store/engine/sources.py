"""Lower tiers, and the blocks that a get finds in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slime_tiered_store.engine.cache_engine import CacheEngine
from slime_tiered_store.index import MatchResult
from slime_tiered_store.keys import SequenceMeta
from slime_tiered_store.transfers import TransferType

__all__ = ["LowerTier", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """A lower tier, its match, and ``stop``: the number of leading blocks that can be read from the tier now.

    ``reach``: the number of leading blocks that the tier may have once transfers of further blocks have ended.
    ``on_settled(callback)`` calls ``callback`` at the end of the first of these transfers. ``on_settled`` is None if no
    such transfer is under way.
    """

    tier: LowerTier
    match_result: MatchResult
    stop: int
    reach: int
    on_settled: Callable[[Callable[[], None]], None] | None


@dataclass(frozen=True, slots=True)
class LowerTier:
    """A tier below memory: its engine, and the types of its transfers."""

    engine: CacheEngine
    read_type: TransferType
    write_type: TransferType

    def source(self, sequence_meta: SequenceMeta, shared_blocks: int) -> Source:
        """Find a sequence. ``shared_blocks``: how many leading blocks a shared tier says that it holds, else 0."""
        engine = self.engine
        match_result = engine.index.match_prefix(sequence_meta)
        stop = match_result.num_ready_matched_blocks
        if match_result.unready_node is not None:
            on_settled = partial(engine.on_settled, match_result.unready_node)
            return Source(self, match_result, stop, match_result.num_matched_blocks, on_settled)
        if match_result.collides:
            return Source(self, match_result, stop, stop, None)
        reach, in_flight = stop, None
        for key in map(sequence_meta.key, range(stop, sequence_meta.num_blocks)):
            if key in engine.reading:
                in_flight = in_flight or partial(engine.on_settled, key)
            elif key not in engine.recovered:
                break
            reach += 1
            stop += in_flight is None
        return Source(
            self, match_result, max(stop, min(shared_blocks, sequence_meta.num_blocks)), reach, in_flight
        )
