"""Finds blocks by their keys, and decides which are evicted."""

from slime_tiered_store.index.match import MatchResult
from slime_tiered_store.index.node import PathKeys, RadixNode
from slime_tiered_store.index.policies import POLICIES
from slime_tiered_store.index.tree import RadixTreeIndex

__all__ = ["POLICIES", "MatchResult", "PathKeys", "RadixNode", "RadixTreeIndex"]
