"""Nodes of the radix tree."""

from __future__ import annotations

from struct import iter_unpack

from slime_tiered_store.keys import KEY_BYTES
from slime_tiered_store.tier import Block, BlockKey

__all__ = ["RadixNode", "path_keys"]


class RadixNode:
    """A run of blocks that follow one another. Only the last one may be short.

    ``keys``: 16 bytes a block. ``tokens``: 4 bytes a token. ``checksums``: 8 bytes a block.
    ``physical_blocks``: the ids in the tier's pool. ``lock_cnt``: the number of users of the node or of
    nodes below it. ``is_detached``: the index no longer finds the node, whose blocks are freed when its last user ends.
    ``heap_index``: the position in the heap of evictable leaves, or -1.
    ``created``, ``last_access``: ticks of the index's clock.
    """

    __slots__ = (
        "checksums",
        "children",
        "created",
        "heap_index",
        "hits",
        "is_detached",
        "is_ready",
        "keys",
        "last_access",
        "lock_cnt",
        "parent",
        "physical_blocks",
        "tokens",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        keys: bytes,
        tokens: bytes,
        checksums: bytes,
        physical_blocks: list[int],
        created: int,
    ) -> None:
        self.parent = parent
        self.keys = keys
        self.tokens = tokens
        self.checksums = checksums
        self.physical_blocks = physical_blocks
        self.children: dict[BlockKey, RadixNode] = {}
        self.is_ready = True
        self.is_detached = False
        self.lock_cnt = 0
        self.created = self.last_access = created
        self.hits = 0
        self.heap_index = -1

    def size(self) -> int:
        """Return the number of blocks."""
        return len(self.physical_blocks)

    def evictable(self) -> bool:
        """Return True for a leaf that nobody uses."""
        return not self.lock_cnt and not self.children and self.parent is not None

    def blocks(self, start: int = 0, stop: int | None = None) -> list[Block]:
        """Return the ids and keys of the blocks from ``start`` to ``stop``."""
        stop = self.size() if stop is None else stop
        keys = iter_unpack(f"{KEY_BYTES}s", self.keys[start * KEY_BYTES : stop * KEY_BYTES])
        return [
            Block(block_id, key)
            for block_id, (key,) in zip(self.physical_blocks[start:stop], keys, strict=True)
        ]


def path_keys(node: RadixNode | None) -> bytes:
    """Return the keys of all blocks from the root to the end of a node: 16 bytes each."""
    parts: list[bytes] = []
    while node is not None:
        parts.append(node.keys)
        node = node.parent
    return b"".join(reversed(parts))
