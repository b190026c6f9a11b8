"""A heap of the nodes that may be evicted."""

from __future__ import annotations

from slime_tiered_store.index.node import RadixNode
from slime_tiered_store.index.policies import Policy

__all__ = ["EvictionHeap"]


class EvictionHeap:
    """Evictable nodes, with the next one to evict on top. Each operation costs O(log n) even in the worst case.

    A node knows its position, so a hit moves one entry. There are no stale entries that a later eviction must skip.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._nodes: list[RadixNode] = []
        self._priorities: list[int] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def first(self) -> RadixNode:
        """Return the node that is evicted next."""
        return self._nodes[0]

    def update(self, node: RadixNode) -> None:
        """Add, move or remove a node after a change of its state."""
        at = node.heap_index
        if not node.evictable() or node.is_detached:
            if at >= 0:
                self._remove(at)
            return
        priority = self._policy(node)
        if at < 0:
            at = len(self._nodes)
            self._nodes.append(node)
            self._priorities.append(priority)
            node.heap_index = at
        self._settle(at, node, priority)

    def _remove(self, at: int) -> None:
        self._nodes[at].heap_index = -1
        node, priority = self._nodes.pop(), self._priorities.pop()
        if at < len(self._nodes):
            self._settle(at, node, priority)

    def _settle(self, at: int, node: RadixNode, priority: int) -> None:
        """Put a node at position ``at``, then move it up or down to its place."""
        nodes, priorities = self._nodes, self._priorities
        while at and priority < priorities[above := (at - 1) // 2]:
            nodes[at], priorities[at] = moved, _ = nodes[above], priorities[above]
            moved.heap_index = at
            at = above
        size = len(nodes)
        while (below := 2 * at + 1) < size:
            if below + 1 < size and priorities[below + 1] < priorities[below]:
                below += 1
            if priorities[below] >= priority:
                break
            nodes[at], priorities[at] = moved, _ = nodes[below], priorities[below]
            moved.heap_index = at
            at = below
        nodes[at], priorities[at] = node, priority
        node.heap_index = at
