"""Digests, and the workers that hold them."""

from __future__ import annotations

__all__ = ["Holders"]


class Holders:
    """Workers, as bits of one number, by digest. A worker may hold a digest several times."""

    __slots__ = ("_bits", "_more")

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}
        #: By digest and bit: how many times beyond the first the worker holds the digest.
        self._more: dict[tuple[int, int], int] = {}

    def at(self, digest: int) -> int:
        """Return the workers, as bits, that hold ``digest``."""
        return self._bits.get(digest, 0)

    def add(self, digest: int, bit: int) -> None:
        """Note that the worker ``bit`` holds ``digest`` one more time."""
        bits = self._bits.get(digest, 0)
        if bits & bit:
            self._more[digest, bit] = self._more.get((digest, bit), 0) + 1
        self._bits[digest] = bits | bit

    def remove(self, digest: int, bit: int) -> None:
        """Note that the worker ``bit``, which must hold ``digest``, holds it one time less."""
        more = self._more.get((digest, bit), 0)
        if more > 1:
            self._more[digest, bit] = more - 1
        elif more:
            del self._more[digest, bit]
        elif left := self._bits[digest] & ~bit:
            self._bits[digest] = left
        else:
            del self._bits[digest]

    def clear(self) -> None:
        """Forget all."""
        self._bits.clear()
        self._more.clear()
