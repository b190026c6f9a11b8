"""Known prefixes of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from slime_tiered_store.frames import CHECKSUM_BYTES
from slime_tiered_store.index.node import RadixNode
from slime_tiered_store.keys import KEY_BYTES
from slime_tiered_store.tier import Block

__all__ = ["MatchResult", "common_blocks"]


@dataclass(slots=True)
class MatchResult:
    """The known prefix of a sequence.

    ``num_matched_blocks``: blocks in the tree. ``num_ready_matched_blocks``: blocks before the first unready node.
    ``last_node``: the node of the last matched block, and ``taken``, the number of its blocks that matched.
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


def common_blocks(ours: bytes, theirs: bytes, first: int) -> int:
    """Return how many first keys of ``ours`` equal the keys of ``theirs`` from block ``first`` on.

    A key covers all blocks before it, so a binary search suffices when not all are equal.
    """
    size = len(ours) // KEY_BYTES
    if theirs.startswith(ours, first * KEY_BYTES):
        return size
    low, high = 0, min(size, len(theirs) // KEY_BYTES - first)
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * KEY_BYTES
        if theirs.startswith(ours[at : at + KEY_BYTES], first * KEY_BYTES + at):
            low = middle
        else:
            high = middle - 1
    return low
