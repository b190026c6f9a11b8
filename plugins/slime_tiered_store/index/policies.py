"""Eviction policies: the node with the lowest priority is evicted first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from slime_tiered_store.index.node import RadixNode

__all__ = ["POLICIES", "Policy"]

#: Returns the priority of a node.
Policy: TypeAlias = Callable[[RadixNode], int]

#: The number of hits from which on the segmented LRU protects a node.
_PROTECTED_HITS = 1
#: No clock value needs more bits.
_CLOCK_BITS = 64


def _lru(node: RadixNode) -> int:
    return node.last_access_time


def _lfu(node: RadixNode) -> int:
    return node.hits << _CLOCK_BITS | node.last_access_time


def _fifo(node: RadixNode) -> int:
    return node.created


def _mru(node: RadixNode) -> int:
    return -node.last_access_time


def _filo(node: RadixNode) -> int:
    return -node.created


def _slru(node: RadixNode) -> int:
    return min(node.hits, _PROTECTED_HITS) << _CLOCK_BITS | node.last_access_time


#: The policies by name: least recently used, least frequently used, first in first out, most recently used,
#: first in last out, and segmented LRU. The last one evicts nodes without a hit before nodes with a hit.
POLICIES: dict[str, Policy] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "mru": _mru,
    "filo": _filo,
    "slru": _slru,
}
