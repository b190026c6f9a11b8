"""A simulated KV cache: it knows the prefixes that would be cached, but holds no keys and values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from slime_engine.kv_events import CacheEvents, Event

__all__ = ["SimulatedCache"]


class SimulatedCache:
    """Prefixes in blocks of ``page_size`` tokens, at most ``tokens`` tokens; the least recently used are evicted first.

    A block's key stands for all tokens up to its end, as in SGLang's radix cache.
    """

    def __init__(self, tokens: int, page_size: int) -> None:
        self._max_blocks = tokens // page_size
        self._page_size = page_size
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._events: CacheEvents | None = None

    def record(self) -> None:
        """Clear the cache, and record this and all later changes for :meth:`take_events`."""
        self._events = CacheEvents(self._page_size)
        self.clear()

    def take_events(self) -> list[Event]:
        """Return the changes since the last call."""
        return [] if self._events is None else self._events.take()

    def match(self, ids: Sequence[int], limit: int) -> int:
        """Return the length of the longest known prefix of ``ids[:limit]``, in tokens of whole blocks. O(tokens)."""
        matched = 0
        for key in self._keys(ids, limit):
            if key not in self._blocks:
                break
            matched += self._page_size
        return matched

    def store(self, ids: Sequence[int], end: int) -> None:
        """Note that ``ids[:end]`` have keys and values. O(tokens)."""
        blocks = self._blocks
        keys = [*self._keys(ids, end)]
        self._note_stored(ids, keys)
        for key in reversed(keys):  # so that long prefixes are evicted before short ones
            blocks[key] = None
            blocks.move_to_end(key)
        evicted = []
        while len(blocks) > self._max_blocks:
            evicted.append(blocks.popitem(last=False)[0])
        if evicted and self._events is not None:
            self._events.removed(evicted)

    def names(self) -> set[int]:
        """Return the hashes of all blocks, by which events name them. O(blocks)."""
        return {*self._blocks}

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        if self._events is not None:
            self._events.cleared()

    def _note_stored(self, ids: Sequence[int], keys: Sequence[int]) -> None:
        """Record the new blocks of ``ids``: all blocks after the longest known prefix."""
        if self._events is None:
            return
        known = next((place for place, key in enumerate(keys) if key not in self._blocks), len(keys))
        if new := keys[known:]:
            size = self._page_size
            self._events.stored(new, keys[known - 1] if known else None, ids[known * size : len(keys) * size])

    def _keys(self, ids: Sequence[int], end: int) -> Iterator[int]:
        size, key = self._page_size, 0
        for stop in range(size, end + 1, size):
            key = hash((key, *ids[stop - size : stop]))
            yield key
