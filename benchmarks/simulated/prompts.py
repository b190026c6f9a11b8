"""Prompts of the simulation: texts, and the blocks of a KV cache that they fill."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

__all__ = ["BLOCK", "Text"]

#: Tokens of a block of the KV cache.
BLOCK = 16
#: Bytes of a token of English text, on average.
_BYTES_PER_TOKEN = 4

_LETTERS = "".join(random.Random(0).choices(string.ascii_letters, k=1 << 18)).encode()
_IDS = random.Random(0).choices(range(10_000, 100_000), k=1 << 16)
_numbers = count()


@dataclass(frozen=True, slots=True)
class Text:
    """A text that consists of parts. No two parts begin in the same way.

    ``parts``: for each part, its number and its number of tokens. ``tokens``: the number of tokens of all parts.
    ``blocks``: a key for each full block of tokens. A key stands for the whole text up to the block's end. ``rest``:
    a key for the tokens after the last full block.
    """

    parts: tuple[tuple[int, int], ...] = ()
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    rest: int = 0

    def then(self, tokens: int) -> Text:
        """Return this text with a new part of ``tokens`` tokens at its end."""
        number = next(_numbers)
        total = self.tokens + tokens
        key = hash((self.blocks[-1] if self.blocks else 0, self.rest, number))
        new = range(self.tokens // BLOCK, total // BLOCK)
        blocks = (*self.blocks, *(hash((key, block)) for block in new))
        return Text(
            (*self.parts, (number, tokens)), total, blocks, hash((0 if new else self.rest, number, total))
        )

    def written(self) -> bytes:
        """Return the text itself, four bytes a token."""
        return b"".join(_written(number, tokens) for number, tokens in self.parts)

    def ids(self) -> list[int]:
        """Return an id for each token."""
        return [one for number, tokens in self.parts for one in _ids(number, tokens)]


@lru_cache(4096)
def _written(number: int, tokens: int) -> bytes:
    begin = number * 7919 % (len(_LETTERS) // 2)
    size = tokens * _BYTES_PER_TOKEN
    return (b"%x " % number + _LETTERS[begin : begin + size])[:size]


@lru_cache(1024)
def _ids(number: int, tokens: int) -> list[int]:
    begin = number * 7919 % (len(_IDS) // 2)
    return [100_000 + number, *_IDS[begin : begin + tokens - 1]][:tokens]
