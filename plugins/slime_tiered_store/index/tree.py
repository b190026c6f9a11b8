"""The radix tree that finds the blocks of one tier by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slime_tiered_store.errors import StaleMatch
from slime_tiered_store.frames import CHECKSUM_BYTES
from slime_tiered_store.index.heap import EvictionHeap
from slime_tiered_store.index.match import MatchResult, common_blocks
from slime_tiered_store.index.node import RadixNode
from slime_tiered_store.index.policies import POLICIES
from slime_tiered_store.keys import KEY_BYTES, TOKEN_BYTES, SequenceMeta
from slime_tiered_store.tier import Block, BlockKey

__all__ = ["RadixTreeIndex"]


class RadixTreeIndex:
    """A tree of runs of blocks. It does no I/O. The caller recycles the blocks that the methods return.

    A node is unready while its bytes are on their way. Nothing is inserted behind an unready node, so such a node
    has no children and is never split: an abort removes it and leaves no hole. A lock counts on all ancestors, too;
    the index itself locks an unready node once. All calls are synchronous, so one event loop needs no mutex.
    """

    def __init__(self, tokens_per_block: int, policy: str = "lru") -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}: use one of {', '.join(POLICIES)}")
        self.tokens_per_block = tokens_per_block
        self.root = RadixNode(None, b"", b"", b"", [], 0)
        self.num_blocks = 0
        self._evictable = EvictionHeap(POLICIES[policy])
        self._num_locked_blocks = 0
        self._clock = 0

    @property
    def num_evictable_blocks(self) -> int:
        """The number of blocks that ``evict`` can remove."""
        return self.num_blocks - self._num_locked_blocks

    def match_prefix(self, sequence_meta: SequenceMeta, update_cache_info: bool = True) -> MatchResult:
        """Find the longest known prefix. Cost: O(nodes on the path), and a comparison of the tokens' bytes.

        ``update_cache_info``: count a hit for the nodes on the path.
        """
        node, taken, matched, ready = self.root, 0, 0, 0
        unready: RadixNode | None = None
        path: list[tuple[RadixNode, int]] = []
        collides = False
        while taken == node.size() and matched < sequence_meta.num_blocks:
            child = node.children.get(sequence_meta.key(matched))
            if child is None:
                break
            same_keys = common_blocks(child, sequence_meta.key, matched, sequence_meta.num_blocks)
            same = self._common_tokens(child, sequence_meta, matched, same_keys)
            collides = same < same_keys
            if not same:
                break
            node, taken = child, same
            path.append((node, taken))
            matched += taken
            if not node.is_ready and unready is None:
                unready = node
            if unready is None:
                ready = matched
        if update_cache_info:
            self._touch(path)
        return MatchResult(matched, ready, node, taken, unready, path, collides)

    def insert(
        self, sequence_meta: SequenceMeta, physical_block_ids: list[int], match_result: MatchResult, checksums: bytes,
        *, is_ready: bool = True,
    ) -> RadixNode:  # fmt: skip
        """Add the blocks that follow those of ``match_result`` as one leaf, and return the leaf.

        ``physical_block_ids``: the ids of the new blocks, at least one. ``checksums``: 8 bytes for each new block.
        Raises ``StaleMatch`` when the tree has changed at the end of ``match_result`` since the match, or when the last
        matched node is unready. The tree is then as before.
        """
        start = match_result.num_matched_blocks
        stop = start + len(physical_block_ids)
        if not start < stop <= sequence_meta.num_blocks or len(checksums) != (stop - start) * CHECKSUM_BYTES:
            raise ValueError(
                f"{len(physical_block_ids)} ids and {len(checksums)} bytes of checksums do not fit "
                f"a sequence of {sequence_meta.num_blocks} blocks with {start} known blocks"
            )
        self._check_match(sequence_meta, match_result)
        parent = match_result.last_node
        if match_result.taken < parent.size():
            parent = self.split(parent, match_result.taken)
        hashes = sequence_meta.block_hashes[start * KEY_BYTES : stop * KEY_BYTES]
        node = RadixNode(
            parent,
            hashes,
            sequence_meta.tokens(start, stop),
            checksums,
            physical_block_ids,
            self._tick(),
        )
        parent.children[sequence_meta.key(start)] = node
        self.num_blocks += node.size()
        self._evictable.update(parent)
        if not is_ready:
            node.is_ready = False
            self.lock(node)
        self._evictable.update(node)
        return node

    def _check_match(self, sequence_meta: SequenceMeta, match_result: MatchResult) -> None:
        node, taken, matched = match_result.last_node, match_result.taken, match_result.num_matched_blocks
        if node.is_detached or taken > node.size():
            raise StaleMatch("the matched node has been evicted, split or reset since: match again")
        if taken and node.key(taken - 1) != sequence_meta.key(matched - 1):
            raise StaleMatch("the matched node has been split since: match again")
        if taken == node.size() and sequence_meta.key(matched) in node.children:
            raise StaleMatch("the next block has been inserted since, or has other tokens: match again")
        if not node.is_ready:
            raise StaleMatch("the matched node is not ready: wait for its transfer, then match again")

    def split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node before its block ``at``, and return the new node of the first part.

        ``node`` becomes the second part, and keeps its children and locks. The first part becomes the parent of
        ``node``, and gets the same number of locks. Cost: O(length of the shorter part).
        """
        if not 0 < at < node.size() or not node.is_ready or node.is_detached or node.parent is None:
            raise ValueError(
                f"a node of {node.size()} blocks (ready: {node.is_ready}) cannot be split at {at}"
            )
        prefix = node.cut(at, self.tokens_per_block)
        node.parent.children[prefix.key(0)] = prefix
        node.parent = prefix
        prefix.children[node.key(0)] = node
        return prefix

    def shrink(self, node: RadixNode, num_blocks: int) -> list[Block]:
        """Remove the last ``num_blocks`` blocks of an evictable leaf, and return them. At least one block must stay.

        Cost: O(blocks removed).
        """
        kept = node.size() - num_blocks
        if not 0 < num_blocks < node.size() or not node.evictable():
            raise ValueError(f"{num_blocks} of the {node.size()} blocks of this node cannot be removed")
        removed = node.blocks(kept)
        del node.block_hashes[kept * KEY_BYTES :], node.tokens[kept * self.tokens_per_block * TOKEN_BYTES :]
        del node.checksums[kept * CHECKSUM_BYTES :], node.physical_blocks[kept:]
        self.num_blocks -= num_blocks
        return removed

    def lock(self, node: RadixNode) -> None:
        """Keep a node and its ancestors from eviction. Cost: O(depth)."""
        above: RadixNode | None = node
        while above is not None:
            above.lock_cnt += 1
            if above.lock_cnt == 1:
                self._num_locked_blocks += above.size()
            above = above.parent
        self._evictable.update(node)

    def unlock(self, node: RadixNode) -> list[Block]:
        """Release one lock. Return the blocks that detached nodes give up with their last lock."""
        if not node.lock_cnt:
            raise ValueError("this node is not locked")
        freed: list[Block] = []
        above: RadixNode | None = node
        while above is not None:
            above.lock_cnt -= 1
            if not above.lock_cnt:
                self._num_locked_blocks -= above.size()
                freed += self._free(above) if above.is_detached else []
            above = above.parent
        self._evictable.update(node)
        return freed

    def set_ready(self, node: RadixNode) -> list[Block]:
        """Mark a node's bytes as complete. Return its blocks if it has been detached and has no other locks."""
        if node.is_ready:
            raise ValueError("this node is ready already")
        node.is_ready = True
        return self.unlock(node)

    def discard(self, node: RadixNode) -> list[Block]:
        """Remove an unready node whose transfer failed. Return its blocks, or none while it has other locks."""
        if node.is_ready:
            raise ValueError("only an unready node can be discarded")
        return self.detach(node) + self.unlock(node)

    def evict(
        self, num_blocks_to_evict: int, on_evict: Callable[[RadixNode, int], None] | None = None
    ) -> list[Block]:
        """Remove up to ``num_blocks_to_evict`` blocks, in the order of the policy, and return them.

        ``on_evict(node, start)`` is called before the blocks of ``node`` from ``start`` on are removed.
        Cost: O(blocks removed + nodes removed * log(leaves)).
        """
        evicted: list[Block] = []
        while len(evicted) < num_blocks_to_evict and len(self._evictable):
            node = self._evictable.first()
            wanted = num_blocks_to_evict - len(evicted)
            start = max(node.size() - wanted, 0)
            if on_evict is not None:
                on_evict(node, start)
            evicted += self.shrink(node, wanted) if start else self.detach(node)
        return evicted

    def detach(self, node: RadixNode, start: int = 0) -> list[Block]:
        """Remove the blocks of ``node`` from ``start`` on, and all that follow. Return the blocks that nobody uses.

        Blocks in use are returned by the call that releases their last lock: ``unlock``, ``set_ready`` or ``discard``.
        """
        if start:
            self.split(node, start)
        if node.parent is None or node.is_detached:
            return []
        del node.parent.children[node.key(0)]
        self._evictable.update(node.parent)
        freed: list[Block] = []
        below = [node]
        for each in below:
            below += each.children.values()
            each.is_detached = True
            self._evictable.update(each)
            freed += self._free(each) if not each.lock_cnt else []
        return freed

    def reset(self) -> list[Block]:
        """Forget all blocks, and return those that nobody uses; see ``detach``."""
        return [block for node in list(self.root.children.values()) for block in self.detach(node)]

    def num_ready(self, key: Callable[[int], BlockKey], num_blocks: int) -> int:
        """Return the number of leading blocks that are ready. ``key(at)``: the key of a block. No hit is counted."""
        node, found = self.root, 0
        while found < num_blocks:
            child = node.children.get(key(found))
            if child is None or not child.is_ready:
                break
            same = common_blocks(child, key, found, num_blocks)
            found += same
            if same < child.size():
                break
            node = child
        return found

    def nodes(self) -> Iterator[RadixNode]:
        """Yield each node that can be found."""
        return self.below(self.root)

    def below(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield each node below ``node``."""
        found = list(node.children.values())
        while found:
            each = found.pop()
            yield each
            found += each.children.values()

    def _free(self, node: RadixNode) -> list[Block]:
        freed = node.blocks()
        self.num_blocks -= node.size()
        del node.physical_blocks[:]
        return freed

    def _touch(self, path: list[tuple[RadixNode, int]]) -> None:
        tick = self._tick()
        for node, _ in path:
            node.last_access_time = tick
            node.hits += 1
            if node.heap_index >= 0:
                self._evictable.update(node)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _common_tokens(self, node: RadixNode, sequence_meta: SequenceMeta, first: int, most: int) -> int:
        """Return the number of a node's leading blocks, at most ``most``, that have the tokens of a sequence's blocks.

        ``first``: the block of ``sequence_meta`` that is compared with the node's first block.
        """
        step = self.tokens_per_block * TOKEN_BYTES
        begin, size = first * step, most * step
        ours = node.tokens if len(node.tokens) <= size else memoryview(node.tokens)[:size]  # no copy
        has_equal_end = len(ours) == size or begin + len(ours) == len(sequence_meta.token_bytes)
        if has_equal_end and sequence_meta.token_bytes.startswith(ours, begin):
            return most
        return next(
            at for at in range(most)
            if node.tokens[at * step : (at + 1) * step] != sequence_meta.tokens(first + at, first + at + 1)
        )  # fmt: skip
