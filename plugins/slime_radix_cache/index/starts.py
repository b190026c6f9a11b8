"""Index of responses by the ids before them: it finds the context of given ids.

The text of the ids does not always lead to their context. It may leave out special tokens that were sampled, and a
tokenizer may compose characters (NFC) that a client sent decomposed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from slime_radix_cache.index.rows import Row, items_of, with_item, without_item
from slime_radix_cache.index.segments import Response, Segment, ids_before

__all__ = ["Starts"]

_BITS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0, and each can be undone
#: Tokens per step, so that the arrays fit in a core's cache.
_BLOCK = 1 << 15
_POWERS = np.cumprod(np.full(_BLOCK, _FACTOR, np.uint64), dtype=np.uint64)
_INVERSES = np.cumprod(np.full(_BLOCK, pow(_FACTOR, -1, _BITS), np.uint64), dtype=np.uint64)
#: Shifts a digest to its first 20 bits.
_SHIFT = 44


class Starts:
    """Responses by a digest of the tokens before them. A search compares the tokens too."""

    def __init__(self) -> None:
        self._by_digest: dict[int, Row[Response]] = {}
        #: Number of responses whose digest has these first bits; it rules out most places of a long prompt at once.
        self._counts = np.full(1 << 64 - _SHIFT, 0, np.uint32)

    def add(self, response: Response) -> None:
        """Note where ``response`` begins. O(tokens since the response before it began)."""
        response.before = _digest_before(response)
        self._by_digest[response.before] = with_item(self._by_digest.get(response.before), response)
        self._counts[response.before >> _SHIFT] += 1

    def remove(self, response: Response) -> None:
        """Undo :meth:`add`."""
        self._counts[response.before >> _SHIFT] -= 1
        alike = without_item(self._by_digest.pop(response.before), response)
        if alike is not None:
            self._by_digest[response.before] = alike

    def along(self, ids: bytes) -> Iterator[tuple[Response, int]]:
        """Yield responses whose context is the first of ``ids`` (packed), with its length: longest first, then newest.

        O(tokens), and a comparison for each such context.
        """
        digest = 0
        found = [(0, 0)] if self._counts[0] else []
        for start, values in _blocks(ids):
            size = len(values)
            values[1:] *= _INVERSES[: size - 1]
            digests = (np.cumsum(values) + np.uint64(digest)) * _POWERS[:size]
            digest = int(digests[-1])
            hits = np.flatnonzero(self._counts[digests >> np.uint64(_SHIFT)])
            found += zip((hits + start + 1).tolist(), digests[hits].tolist(), strict=True)
        for place, digest in reversed(found):
            same: dict[tuple[Segment | None, int], bool] = {}
            for response in reversed(items_of(self._by_digest.get(digest))):
                context = response.parent, response.kept
                if context not in same:
                    same[context] = ids_before(response) == ids[: 4 * place]
                if same[context]:
                    yield response, place


def _digest_before(response: Response) -> int:
    """Return the digest of the tokens before ``response``, from that of the response before it."""
    since: list[bytes] = []
    digest = 0
    here: Segment = response
    while here.parent is not None:
        since.append(here.parent.ids[: 4 * here.kept])
        here = here.parent
        if isinstance(here, Response):
            digest = here.before
            break
    since.reverse()
    for _, values in _blocks(b"".join(since)):
        size = len(values)
        digest = (digest * int(_POWERS[size - 1]) + int(np.dot(values, _POWERS[size - 1 :: -1]))) % _BITS
    return digest


def _blocks(ids: bytes) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yield blocks of the coefficients of a polynomial modulo 2**64, each with the place where it begins.

    The digest of n ids is the sum of ``(id + 1) * _FACTOR ** (n - place)``.
    """
    values = np.frombuffer(ids, np.int32)
    for start in range(0, len(values), _BLOCK):
        yield start, values[start : start + _BLOCK].astype(np.uint64) + np.uint64(1)
