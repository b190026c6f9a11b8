"""Known prefixes of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime_tiered_store.frames import CHECKSUM_BYTES
from slime_tiered_store.index.node import RadixNode
from slime_tiered_store.keys import KEY_BYTES
from slime_tiered_store.tier import Block, BlockKey

__all__ = ["MatchResult", "common_blocks"]


@dataclass(slots=True)
class MatchResult:
    """The known prefix of a sequence.

    ``num_matched_blocks``: blocks in the tree. ``num_ready_matched_blocks``: blocks before the first unready node.
    ``last_node``: the node of the last matched block. ``taken``: the number of blocks of this node that matched.
    ``unready_node``: the first unready node on the path. ``path``: each node with its number of matched blocks.
    ``collides``: the next block has a known key, but other tokens.
    """

    num_matched_blocks: int
    num_ready_matched_blocks: int
    last_node: RadixNode
    taken: int
    unready_node: RadixNode | None
    path: list[tuple[RadixNode, int]]
    collides: bool

    @property
    def last_ready_node(self) -> RadixNode:
        """The node of the last ready block."""
        above = self.unready_node.parent if self.unready_node is not None else self.last_node
        return above or self.last_node

    def blocks(self, start: int, stop: int) -> list[Block]:
        """Return ids and keys of the matched blocks from ``start`` to ``stop``."""
        found: list[Block] = []
        first = 0
        for node, taken in self.path:
            if first + taken > start and first < stop:
                found += node.blocks(max(start - first, 0), min(taken, stop - first))
            first += taken
        return found

    def checksums(self) -> bytes:
        """Return the checksums of the matched blocks: 8 bytes each."""
        return b"".join(node.checksums[: taken * CHECKSUM_BYTES] for node, taken in self.path)


def common_blocks(node: RadixNode, key: Callable[[int], BlockKey], start: int, stop: int) -> int:
    """Return the number of leading keys of a node that equal ``key(start)``, ``key(start + 1)``, ... before ``stop``.

    A key covers all blocks before it. So one comparison, of the last key, finds that all are equal; otherwise a binary
    search finds the first difference. Cost: O(log(blocks)).
    """
    low, high = 0, min(len(node.physical_blocks), stop - start)
    middle = high
    while low < high:
        at = (middle - 1) * KEY_BYTES
        if node.block_hashes[at : at + KEY_BYTES] == key(start + middle - 1):
            if middle == high:
                return high
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
