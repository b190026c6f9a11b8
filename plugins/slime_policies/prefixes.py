"""Beginnings of prompts that a worker has seen, and probably has in its cache: a few digests a prompt.

A tree of characters, as in the SGLang gateway, would take Python longer than the rest of a request. Here a prompt is
the bytes of the body from the prompt's key on, and nothing is parsed. Each of its beginnings of 128, 192, 256, 384,
512, 768 ... bytes has a digest. So the length of a match is known to within a third, with 19 digests for 64 kB.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Prompt", "Seen"]

#: The prompt's key, after which the prompt begins; used if it is near the beginning of the body.
_KEY = re.compile(rb'"(?:text|input_ids|messages|prompt)"\s*:\s*')
_KEY_WITHIN = 4096
#: Of a longer prompt, only this many bytes are hashed, which takes 0.2 ms.
_MAX_BYTES = 1 << 20


def _cuts() -> Iterator[int]:
    size = 128
    while size < _MAX_BYTES:
        yield from (size, size + size // 2)
        size *= 2
    yield _MAX_BYTES


_CUTS = tuple(_cuts())


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginnings of one prompt, the shortest first.

    ``parts``: for each beginning, its digest and the bytes by which it is longer than the beginning before.
    ``size``: bytes of the prompt, 1 MiB at most. A prompt of less than 128 bytes has no parts.
    """

    parts: tuple[tuple[int, int], ...]
    size: int

    @classmethod
    def of(cls, body: bytes) -> Prompt:
        """Return the prompt in the ``body`` of a request. O(size), at 6 GB/s."""
        key = _KEY.search(body, 0, _KEY_WITHIN)
        # Without a key, the prompt begins after the first comma: the first field may be the request's own id.
        start = key.end() if key else body.find(b",", 0, _KEY_WITHIN) + 1
        size = min(len(body) - start, _MAX_BYTES)
        parts = []
        digest = begin = 0
        for cut in _CUTS:
            if cut > size:
                break
            digest = hash((digest, body[start + begin : start + cut]))  # SipHash, keyed anew in each process
            parts.append((digest, cut - begin))
            begin = cut
        return cls(tuple(parts), size)


class Seen:
    """Prompts that one worker was sent, at most ``limit`` bytes of them; the least recently used are evicted first.

    A digest stands for 64 bytes of a prompt or more, and takes about 150 bytes of memory.
    """

    __slots__ = ("_known", "_limit", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[int, int] = OrderedDict()
        self.size = 0

    def __contains__(self, digest: int) -> bool:
        return digest in self._known

    def add(self, prompt: Prompt) -> None:
        """Record that the worker gets ``prompt``."""
        known = self._known
        # Longest first, so that long beginnings are evicted before the short ones, with which each search starts.
        for digest, size in reversed(prompt.parts):
            if digest in known:
                known.move_to_end(digest)
            else:
                known[digest] = size
                self.size += size
        while self.size > self._limit:
            self.size -= known.popitem(last=False)[1]
