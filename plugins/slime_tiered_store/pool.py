"""A pool of block ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from slime_tiered_store.errors import NotEnoughSpaceError

__all__ = ["Mempool"]

_WORD = 64
_FULL = (1 << _WORD) - 1


class Mempool:
    """The free block ids of a tier, one bit each. To allocate or recycle n ids costs O(n).

    A word holds the bits of 64 ids. ``_free_words`` has the index of each word with a free id exactly once, so that
    an allocation need not search for free ids.
    """

    def __init__(self, num_total_blocks: int, name: str = "memory") -> None:
        if num_total_blocks < 0:
            raise ValueError(f"num_total_blocks must not be negative, got {num_total_blocks}")
        self.name = name
        self.num_total_blocks = num_total_blocks
        self.num_free_blocks = num_total_blocks
        words = -(-num_total_blocks // _WORD)
        self._bits = array("Q", [_FULL]) * words
        if num_total_blocks % _WORD:
            self._bits[-1] = (1 << num_total_blocks % _WORD) - 1
        self._free_words = array("q", range(words - 1, -1, -1))

    @property
    def num_used_blocks(self) -> int:
        """The number of allocated ids."""
        return self.num_total_blocks - self.num_free_blocks

    def allocate_blocks(self, num: int) -> list[int]:
        """Return ``num`` free ids, which are then in use.

        Raises ``NotEnoughSpaceError`` if fewer ids are free. The pool is then as before.
        """
        if num < 0:
            raise ValueError(f"the number of blocks must not be negative, got {num}")
        if num > self.num_free_blocks:
            raise NotEnoughSpaceError(self.name, num, self.num_free_blocks)
        self.num_free_blocks -= num
        ids: list[int] = []
        while len(ids) < num:
            word = self._free_words[-1]
            bits, first = self._bits[word], word * _WORD
            while bits and len(ids) < num:
                lowest = bits & -bits
                ids.append(first + lowest.bit_length() - 1)
                bits ^= lowest
            self._bits[word] = bits
            if not bits:
                self._free_words.pop()
        return ids

    def claim_blocks(self, block_ids: Iterable[int]) -> None:
        """Mark ``block_ids``, of blocks that an earlier process left, as in use.

        Costs O(all words), however few the ids. Raises ``ValueError`` for an id that is in use, is given
        twice or does not exist.
        """
        claimed = self._masks(block_ids, free=True)
        for word, mask in claimed.items():
            self._bits[word] ^= mask
            self.num_free_blocks -= mask.bit_count()
        self._free_words = array("q", (word for word in self._free_words if self._bits[word]))

    def recycle_blocks(self, block_ids: Iterable[int]) -> None:
        """Give ids back.

        Raises ``ValueError`` when an id is free already, is given twice or does not exist. No id is recycled then.
        """
        recycled = self._masks(block_ids, free=False)
        for word, mask in recycled.items():
            if not self._bits[word]:
                self._free_words.append(word)
            self._bits[word] |= mask
            self.num_free_blocks += mask.bit_count()

    def _masks(self, block_ids: Iterable[int], free: bool) -> dict[int, int]:
        """Return the bits of the ids, by word.

        Raises ValueError for an id that does not exist or is given twice, for an id in use if ``free`` is True, and for
        a free id if ``free`` is False.
        """
        masks: dict[int, int] = {}
        for each in block_ids:
            if not 0 <= each < self.num_total_blocks:
                raise ValueError(f"pool {self.name}: block {each} does not exist")
            word, bit = each // _WORD, 1 << each % _WORD
            if bool(self._bits[word] & bit) is not free:
                raise ValueError(f"pool {self.name}: block {each} is {'in use' if free else 'free'} already")
            if masks.get(word, 0) & bit:
                raise ValueError(f"pool {self.name}: block {each} is given twice")
            masks[word] = masks.get(word, 0) | bit
        return masks
