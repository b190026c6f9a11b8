"""Prefixes that workers were sent and may not have computed yet, so that no KV event reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_policies.holders import Holders

__all__ = ["Pending"]

#: Prefixes that were sent longer ago than this are dropped when others are added. Most likely their request failed, or
#: KV events report them.
_LIMIT_S = 60.0
#: The most requests that are remembered; the oldest are forgotten first.
_MOST = 4096


@dataclass(frozen=True, slots=True)
class _Sent:
    at: float
    bit: int
    digests: Sequence[int]


class Pending:
    """Digests of prefixes. For each: the workers, as bits, that were sent the prefix and have not answered."""

    __slots__ = ("_holders", "_sent")

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}  # the oldest first
        self._holders = Holders()

    def __len__(self) -> int:
        return len(self._sent)

    def at(self, digest: int) -> int:
        """Return the workers, as bits, that were sent the prefix."""
        return self._holders.at(digest)

    def add(self, number: int, bit: int, digests: Sequence[int], now: float) -> None:
        """Note that a worker, given as a bit, was sent request ``number``, whose prefixes have these ``digests``."""
        while self._sent:
            oldest = next(iter(self._sent))
            if len(self._sent) < _MOST and self._sent[oldest].at > now - _LIMIT_S:
                break
            self.remove(oldest)
        self._sent[number] = _Sent(now, bit, digests)
        for digest in digests:
            self._holders.add(digest, bit)

    def remove(self, number: int) -> None:
        """Forget request ``number``, if it is there."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        for digest in sent.digests:
            self._holders.remove(digest, sent.bit)

    def clear(self) -> None:
        """Forget all."""
        self._sent.clear()
        self._holders.clear()
