"""Parts of texts and their tokens, made once for all who need them."""

from __future__ import annotations

import os
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
import anyio.to_thread

__all__ = ["Part", "Parts", "cut"]

#: Longer texts go to a thread: about 1 ms of work, far more than the hop costs.
_LONG_TEXT = 4096
#: Shorter pieces between two seams are kept with the next ones: a token costs 1 µs, a part as much.
_SHORT_PART = 512
_OVERHEAD_BYTES = 300
_NICE = 10


class Part(NamedTuple):
    """A text to tokenise on its own; it ``follows`` other tokens, or is ``framed`` by a BOS and the like."""

    text: str
    follows: bool = False
    framed: bool = False


def cut(text: str, seams: re.Pattern[str] | None) -> list[str]:
    """``text`` in parts that begin at seams. What texts have in common at their beginnings is cut alike."""
    if seams is None or len(text) < _SHORT_PART:
        return [text]
    parts = []
    start = 0
    for seam in seams.finditer(text, 1):
        if seam.start() - start >= _SHORT_PART:
            parts.append(text[start : seam.start()])
            start = seam.start()
    parts.append(text[start:])
    return parts


class Parts:
    """Packed ids of parts, the most recently used ones kept. A part that is being tokenised is waited for.

    ``encode`` tokenises some parts in one go; it is called in a thread when they are long.
    """

    def __init__(self, encode: Callable[[Sequence[Part]], list[Sequence[int]]], *, max_bytes: int) -> None:
        self.encoded = self.reused = 0
        self.tokens_encoded = self.tokens_reused = 0
        self._encode = encode
        self._threads = anyio.CapacityLimiter(_threads())
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._known: OrderedDict[Part, bytes] = OrderedDict()
        self._running: dict[Part, anyio.Event] = {}

    async def ids(self, parts: Sequence[Part]) -> bytes:
        """Packed int32 ids of ``parts``, one after the other. Raises what the tokenizer raises."""
        found: dict[Part, bytes] = {}
        while missing := [part for part in parts if part not in found]:
            mine = []
            for part in dict.fromkeys(missing):
                if part in self._known:
                    self._known.move_to_end(part)
                    found[part] = self._known[part]
                    self.reused += 1
                    self.tokens_reused += len(found[part]) // 4
                elif part not in self._running:
                    mine.append(part)
            if mine:
                found |= await self._make(mine)
            elif missing := [part for part in missing if part not in found]:
                await self._running[missing[0]].wait()
        return b"".join([found[part] for part in parts])

    async def _make(self, parts: list[Part]) -> dict[Part, bytes]:
        if sum(len(part.text) for part in parts) < _LONG_TEXT:
            return self._keep(parts, self._encode(parts))
        done = anyio.Event()
        self._running |= dict.fromkeys(parts, done)
        try:
            encoded = await anyio.to_thread.run_sync(self._encode_behind, parts, limiter=self._threads)
            return self._keep(parts, encoded)
        finally:
            for part in parts:
                del self._running[part]
            done.set()

    def _encode_behind(self, parts: Sequence[Part]) -> list[Sequence[int]]:
        """In a thread, to which the kernel prefers the event loop's."""
        if sys.platform == "linux":  # elsewhere it would be the priority of the whole process
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        return self._encode(parts)

    def _keep(self, parts: list[Part], encoded: list[Sequence[int]]) -> dict[Part, bytes]:
        made = {part: array("i", ids).tobytes() for part, ids in zip(parts, encoded, strict=True)}
        for part, ids in made.items():
            self.encoded += 1
            self.tokens_encoded += len(ids) // 4
            self._known[part] = ids
            self._size_bytes += _size_bytes(part, ids)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= _size_bytes(*self._known.popitem(last=False))
        return made


def _threads() -> int:
    """All cores but one: dozens of threads that tokenise would leave the event loop a small share of its own."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores - 1)


def _size_bytes(part: Part, ids: bytes) -> int:
    return sys.getsizeof(part.text) + len(ids) + _OVERHEAD_BYTES
