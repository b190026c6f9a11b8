"""A simulated KV cache: it knows which prefixes have keys and values, and has none itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["SimulatedCache"]


class SimulatedCache:
    """Prefixes in blocks of ``page_size`` tokens, at most ``tokens`` tokens; the least recently used are evicted first.

    A block's key stands for all tokens up to its end, as in SGLang's radix cache.
    """

    def __init__(self, tokens: int, page_size: int) -> None:
        self._most = tokens // page_size
        self._page_size = page_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, ids: Sequence[int], limit: int) -> int:
        """Return the tokens of the longest known prefix of ``ids``, in whole blocks; at most ``limit``. O(tokens)."""
        matched = 0
        for key in self._keys(ids, limit):
            if key not in self._blocks:
                break
            matched += self._page_size
        return matched

    def store(self, ids: Sequence[int], end: int) -> None:
        """Note that ``ids[:end]`` have keys and values. O(tokens)."""
        blocks = self._blocks
        for key in reversed([*self._keys(ids, end)]):  # so that long prefixes are evicted before short ones
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._most:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()

    def _keys(self, ids: Sequence[int], end: int) -> Iterator[int]:
        size, key = self._page_size, 0
        for stop in range(size, end + 1, size):
            key = hash((key, *ids[stop - size : stop]))
            yield key
