"""The text trie of this router's first generation, rewritten: the baseline for the radix cache.

A node has the text of one piece as its key, its tokens as Python lists, and its children in a list. A child
matches if the remaining text starts with its whole key, so every child is tried; nodes are never split. The original's
lock, ages and statistics are left out, so this trie is a little faster.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Found", "Node", "Trie"]


class Node:
    """One piece of text with its tokens."""

    __slots__ = ("children", "ids", "key", "logprobs", "mask")

    def __init__(self, key: str, ids: list[int], logprobs: list[float], mask: list[int]) -> None:
        self.key = key
        self.ids = ids
        self.logprobs = logprobs
        self.mask = mask
        self.children: list[Node] = []


class Found(NamedTuple):
    """The tokens of the first ``position`` characters."""

    position: int
    ids: list[int]
    logprobs: list[float]
    mask: list[int]


class Trie:
    """A trie whose nodes match by their whole keys."""

    def __init__(self) -> None:
        self.root = Node("", [], [], [])

    def add(self, parent: Node, key: str, ids: list[int], logprobs: list[float], mask: list[int]) -> Node:
        """Add a child with ``key`` to ``parent``. O(1): it does not check if the key is there already."""
        node = Node(key, ids, logprobs, mask)
        parent.children.append(node)
        return node

    def find(self, text: str) -> Found:
        """Return the tokens of the beginning of ``text`` that matches whole keys. O(children of each node passed).

        At each node, the matching child with the longest key is the next node.
        """
        node = self.root
        position = 0
        ids: list[int] = []
        logprobs: list[float] = []
        mask: list[int] = []
        while True:
            best = None
            longest = 0
            for child in node.children:
                if text.startswith(child.key, position) and len(child.key) > longest:
                    best, longest = child, len(child.key)
            if best is None:
                return Found(position, ids, logprobs, mask)
            node = best
            position += longest
            ids.extend(node.ids)
            logprobs.extend(node.logprobs)
            mask.extend(node.mask)
