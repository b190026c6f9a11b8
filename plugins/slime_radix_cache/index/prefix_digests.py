"""Digests of sequences, and a search for known sequences that are a prefix of a given one.

The digest of n values is the sum of ``(value + 1) * _FACTOR ** (n - place)`` modulo 2**64, with places from 0. So the
digest of a longer sequence follows from the digest of its beginning.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["PrefixDigests", "extended"]

_BITS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0, and each has an inverse
#: Values per step, so that the arrays fit in a core's cache.
_BLOCK = 1 << 15
_POWERS = np.cumprod(np.full(_BLOCK, _FACTOR, np.uint64), dtype=np.uint64)
#: The powers of the inverse of ``_FACTOR``, from the power 0 on, as signed numbers; and the running sums of them.
_INVERSES = np.cumprod(np.append(np.uint64(1), np.full(_BLOCK - 1, pow(_FACTOR, -1, _BITS), np.uint64))).view(
    np.int64
)
_INVERSE_SUMS = _INVERSES.cumsum().view(np.uint64)
#: ``_POWERS`` as signed numbers, highest first; and the running sums of ``_POWERS``.
_SIGNED_POWERS = _POWERS.view(np.int64)[::-1].copy()
_SUMS = _POWERS.cumsum(dtype=np.uint64)
#: To shift a digest right by this number of bits leaves its first 20 bits.
_SHIFT = 44
#: Sequences are counted by these bits of their last value.
_LAST_BITS = 0xFFFF


class PrefixDigests:
    """A multiset of sequences, each known by its digest and its last value (0 for an empty sequence).

    ``kind``: the numpy type of the values. A search rules out most prefixes by two tables. One counts the sequences by
    their last value. The other, which is large and slow to read, counts them by the first bits of their digest.
    """

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._kind = np.dtype(kind)
        self._last_bits = min(_LAST_BITS, int(np.iinfo(self._kind).max))
        self._behind = np.zeros(_LAST_BITS + 1, np.uint32)
        self._is_behind = np.zeros(_LAST_BITS + 1, np.bool_)  # a look-up takes less time than in ``_behind``
        # np.zeros gets its memory page by page, when it is first used: filling 4 MiB takes some milliseconds.
        self._counts = np.zeros(1 << 64 - _SHIFT, np.uint32)

    def add(self, digest: int, last: int) -> None:
        """Add a sequence."""
        self._behind[last & self._last_bits] += 1
        self._is_behind[last & self._last_bits] = True
        self._counts[digest >> _SHIFT] += 1

    def remove(self, digest: int, last: int) -> None:
        """Undo :meth:`add`."""
        self._behind[last & self._last_bits] -= 1
        self._is_behind[last & self._last_bits] = self._behind[last & self._last_bits]
        self._counts[digest >> _SHIFT] -= 1

    def along(self, values: bytes) -> list[tuple[int, int]]:
        """Return ``(length, digest)`` of the prefixes of ``values`` (packed) that may be in the set, shortest first.

        O(values).
        """
        digest = 0
        found = [(0, 0)] if self._counts[0] else []
        packed = np.frombuffer(values, self._kind)
        for start in range(0, len(packed), _BLOCK):
            block = packed[start : start + _BLOCK]
            size = len(block)
            # As signed numbers modulo 2**64, see ``extended``.
            sums = (block * _INVERSES[:size]).cumsum().view(np.uint64)
            places = self._is_behind.take(block & self._last_bits).nonzero()[0]
            digests = (sums[places] + _INVERSE_SUMS[places] + np.uint64(digest)) * _POWERS[places]
            hits = self._counts.take((digests >> np.uint64(_SHIFT)).view(np.int64)).nonzero()[0]
            found += zip((places[hits] + (start + 1)).tolist(), digests[hits].tolist(), strict=True)
            ahead = int(sums[-1]) + int(_INVERSE_SUMS[size - 1]) + digest
            digest = ahead * int(_POWERS[size - 1]) % _BITS
        return found


def extended(digest: int, values: bytes, kind: npt.DTypeLike) -> int:
    """Return the digest of a sequence with this ``digest``, followed by ``values`` (packed). O(values)."""
    packed = np.frombuffer(values, kind)
    for start in range(0, len(packed), _BLOCK):
        block = packed[start : start + _BLOCK]
        size = len(block)
        # As signed numbers modulo 2**64: numpy would convert int32 and uint64 to float64, which is not exact.
        ahead = int(block.dot(_SIGNED_POWERS[-size:])) + int(_SUMS[size - 1])
        digest = (digest * int(_POWERS[size - 1]) + ahead) % _BITS
    return digest
