"""Nodes of the radix tree."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from struct import iter_unpack
from typing import TypeVar

from slime_tiered_store.frames import CHECKSUM_BYTES
from slime_tiered_store.keys import KEY_BYTES, TOKEN_BYTES
from slime_tiered_store.tier import Block, BlockKey

__all__ = ["PathKeys", "RadixNode"]

T = TypeVar("T", bytearray, "array[int]")


class RadixNode:
    """A run of blocks that follow one another. Only the last block may be shorter than the others.

    ``block_hashes``: the keys, 16 bytes a block. ``tokens``: 4 bytes a token. ``checksums``: 8 bytes a block. All
    three are byte arrays, because a byte array can lose its end without a copy of the rest. ``physical_blocks``: the
    ids in the pool, 8 bytes a block.
    ``lock_cnt``: the number of users of the node or of nodes below it. ``is_detached``: the index no longer finds the
    node, whose blocks are freed when its last user ends.
    ``heap_index``: the position in the heap of evictable leaves, or -1.
    ``created``, ``last_access_time``: ticks of the index's clock.
    """

    __slots__ = (
        "block_hashes",
        "checksums",
        "children",
        "created",
        "heap_index",
        "hits",
        "is_detached",
        "is_ready",
        "last_access_time",
        "lock_cnt",
        "parent",
        "physical_blocks",
        "tokens",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        block_hashes: bytes | bytearray,
        tokens: bytes | bytearray,
        checksums: bytes | bytearray,
        physical_block_ids: Iterable[int],
        created: int,
    ) -> None:
        self.parent = parent
        self.block_hashes = bytearray(block_hashes)
        self.tokens = bytearray(tokens)
        self.checksums = bytearray(checksums)
        self.physical_blocks = array("q", physical_block_ids)
        self.children: dict[BlockKey, RadixNode] = {}
        self.is_ready = True
        self.is_detached = False
        self.lock_cnt = 0
        self.created = self.last_access_time = created
        self.hits = 0
        self.heap_index = -1

    def size(self) -> int:
        """Return the number of blocks."""
        return len(self.physical_blocks)

    def evictable(self) -> bool:
        """Return True for a leaf that nobody uses."""
        return not self.lock_cnt and not self.children and self.parent is not None

    def key(self, block: int) -> BlockKey:
        """Return the key of a block."""
        return bytes(self.block_hashes[block * KEY_BYTES : (block + 1) * KEY_BYTES])

    def cut(self, at: int, tokens_per_block: int) -> RadixNode:
        """Return a new node that takes over the blocks before ``at``, with equal locks and times.

        The caller links both nodes.
        """
        prefix = RadixNode(self.parent, b"", b"", b"", [], self.created)
        prefix.last_access_time, prefix.hits, prefix.lock_cnt = (
            self.last_access_time,
            self.hits,
            self.lock_cnt,
        )
        prefix.block_hashes, self.block_hashes = _cut(self.block_hashes, at * KEY_BYTES)
        prefix.tokens, self.tokens = _cut(self.tokens, at * tokens_per_block * TOKEN_BYTES)
        prefix.checksums, self.checksums = _cut(self.checksums, at * CHECKSUM_BYTES)
        prefix.physical_blocks, self.physical_blocks = _cut(self.physical_blocks, at)
        return prefix

    def blocks(self, start: int = 0, stop: int | None = None) -> list[Block]:
        """Return the ids and keys of the blocks from ``start`` to ``stop``."""
        stop = self.size() if stop is None else stop
        keys = iter_unpack(f"{KEY_BYTES}s", self.block_hashes[start * KEY_BYTES : stop * KEY_BYTES])
        return [
            Block(block_id, key)
            for block_id, (key,) in zip(self.physical_blocks[start:stop], keys, strict=True)
        ]


class PathKeys:
    """The keys of all blocks from the root to the end of a node. Cost: O(nodes on the path), however long they are."""

    def __init__(self, node: RadixNode) -> None:
        path: list[RadixNode] = []
        above: RadixNode | None = node
        while above is not None:
            path.append(above)
            above = above.parent
        self._nodes = path[::-1]
        self._ends = list(accumulate(each.size() for each in self._nodes))

    def __len__(self) -> int:
        return self._ends[-1]

    def key(self, block: int) -> BlockKey:
        """Return the key of a block, counted from the root."""
        at = bisect_right(self._ends, block)
        node = self._nodes[at]
        return node.key(block - self._ends[at] + node.size())


def _cut(whole: T, at: int) -> tuple[T, T]:
    """Return the parts before and after ``at``. Cost: O(length of the shorter part).

    A longer part that is not copied keeps the memory of the shorter one, so parts of similar length are both copied.
    """
    if 4 * min(at, len(whole) - at) >= len(whole):
        return whole[:at], whole[at:]
    if 2 * at < len(whole):
        part = whole[:at]
        del whole[:at]
        return part, whole
    part = whole[at:]
    del whole[at:]
    return whole, part
