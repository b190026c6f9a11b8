"""Responses by the ids that stand before them: given ids lead there, whatever text they were sent or received as.

A text is no way from ids to their context: it may leave out special tokens that were sampled, and a tokenizer may
compose what a client wrote apart (NFC).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from slime_radix_cache.segments import Response, Segment, ids_before
from slime_radix_cache.text_index import Row, with_item, without_item

__all__ = ["Starts"]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no power of it is 0
#: Tokens. For longer ones more powers are made.
_LONG_PROMPT = 1 << 18
#: Bits of a digest that are not among its first twenty.
_SHIFT = 44


class Starts:
    """Where responses begin, by a digest of what stands before them; that is compared before it is believed."""

    def __init__(self) -> None:
        self._by_digest: dict[int, Row[Response]] = {}
        self._powers = _powers(_LONG_PROMPT)
        #: How many digests have these first bits: so that most places of a long prompt are passed over at once.
        self._counts = np.full(1 << 64 - _SHIFT, 0, np.uint32)

    def add(self, response: Response) -> None:
        """Note where ``response`` begins. O(tokens before it)."""
        response.before = int(self._terms(ids_before(response)).sum())
        self._by_digest[response.before] = with_item(self._by_digest.get(response.before, ()), response)
        self._counts[response.before >> _SHIFT] += 1

    def remove(self, response: Response) -> None:
        """Undo :meth:`add`."""
        self._counts[response.before >> _SHIFT] -= 1
        alike = without_item(self._by_digest.pop(response.before), response)
        if alike:
            self._by_digest[response.before] = alike

    def along(self, ids: bytes) -> Iterator[tuple[Response, int]]:
        """Responses before which stand the first of ``ids`` (packed), and how many: most first, newest first.

        O(tokens), and a comparison for each context that they continue.
        """
        digests = np.zeros(len(ids) // 4 + 1, np.uint64)
        np.cumsum(self._terms(ids), out=digests[1:])
        for place in np.flatnonzero(self._counts[digests >> np.uint64(_SHIFT)])[::-1].tolist():
            same: dict[tuple[Segment | None, int], bool] = {}
            for response in reversed(self._by_digest.get(int(digests[place]), ())):
                context = response.parent, response.kept
                if context not in same:
                    same[context] = ids_before(response) == ids[: 4 * place]
                if same[context]:
                    yield response, place

    def _terms(self, ids: bytes) -> npt.NDArray[np.uint64]:
        """Of a polynomial modulo 2**64: their sums are the digests of the first 1, 2, ... ``ids``."""
        values = np.frombuffer(ids, np.int32).astype(np.uint64) + np.uint64(1)
        if len(values) > len(self._powers):
            self._powers = _powers(len(values))
        return values * self._powers[: len(values)]


def _powers(number: int) -> npt.NDArray[np.uint64]:
    return np.cumprod(np.full(number, _FACTOR), dtype=np.uint64)
