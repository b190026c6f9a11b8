"""Prefixes of prompts, and the workers that were sent them. Such a worker probably has the prefix in its cache.

A tree of characters, as in the SGLang gateway, would take Python longer than the rest of a request. Here a prompt is
the bytes of the body from the prompt's key on, and nothing is parsed. Some prefixes have a digest: the prefixes of 16,
32, 64, 128 and 256 bytes, then one every 256 bytes up to 8 kB, every 512 up to 64 kB, every 4,096 up to 1 MiB. One map
holds for each digest the workers as bits of one number, so a lookup does not take longer with more workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from slime_policies.horizons import Horizons
from slime_policies.prompt_key import find_prompt

__all__ = ["Known", "Prefixes", "Prompt", "Use"]

#: Without a key, the prompt begins after the first comma, if that is near the beginning of the body.
_COMMA_WITHIN = 4096
#: Only this many bytes of a prompt are hashed, which takes 0.2 ms.
_MAX_BYTES = 1 << 20
#: A shorter part counts as this many bytes against the limit of the map, since an entry of the map takes memory, too.
_LEAST_BYTES = 256


def _cuts() -> Iterator[int]:
    yield from (16, 32, 64, 128)
    yield from range(256, 8 << 10, 256)
    yield from range(8 << 10, 64 << 10, 512)
    yield from range(64 << 10, _MAX_BYTES + 1, 4096)


_CUTS = tuple(_cuts())
#: The bytes between each prefix and the next longer prefix: their place, and their number.
_SPANS = tuple((slice(begin, end), end - begin) for begin, end in pairwise((0, *_CUTS)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prefixes of one prompt, the shortest first.

    ``parts``: for each prefix, its digest and the bytes by which it is longer than the prefix before. ``size``: bytes
    of the prompt, 1 MiB at most; what follows the prompt in the body is counted too. ``per_token``: bytes of a token.
    """

    parts: tuple[tuple[int, int], ...]
    size: int
    per_token: int

    @classmethod
    def of(cls, body: bytes) -> Prompt:
        """Return the prompt in the ``body`` of a request. O(size), at 6 GB/s; up to 0.5 us for each prefix."""
        start, per_token = find_prompt(body)
        if start is None:  # the first field may be the request's own id
            start = body.find(b",", 0, _COMMA_WITHIN) + 1
        size = min(len(body) - start, _MAX_BYTES)
        prompt = body[start : start + size]
        parts = []
        digest = 0
        count = bisect_right(_CUTS, size)
        for span, more in _SPANS[:count]:
            digest = hash((digest, prompt[span]))  # SipHash, with another key in each process
            parts.append((digest, more))
        begin = _CUTS[count - 1] if count else 0
        if begin < size < 2 * _CUTS[3]:  # the end of a short prompt counts, too
            parts.append((hash((digest, prompt[begin:])), size - begin))
        return cls(tuple(parts), size, per_token)


@dataclass(slots=True)
class Use:
    """The use of a prompt by choice ``number``. ``is_answered``: the worker has answered, so it computed the prompt."""

    number: int
    is_answered: bool = False


@dataclass(slots=True)
class Known:
    """The state of one prefix. ``workers``: the workers that were sent the prefix, as bits. ``use``: its last use.

    ``visits``: the number of requests that had the prefix. ``size``: its bytes that count against the limit.
    """

    workers: int
    visits: int
    size: int
    use: Use


class Prefixes:
    """Prefixes of prompts that workers were sent, at most ``limit`` bytes of them in all.

    The least recently used are evicted first. An entry counts as 256 bytes or more, and takes about 260 bytes of
    memory.
    """

    __slots__ = ("_known", "_limit", "get", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[int, Known] = OrderedDict()
        self.size = 0
        #: Returns the state of a prefix, by its digest. A method would be slower, and a prompt has up to 388 prefixes.
        self.get: Callable[[int], Known | None] = self._known.get

    def add(self, prompt: Prompt, worker: int, use: Use, horizons: Horizons) -> None:
        """Record that a worker, given as a bit, gets ``prompt``. From each prefix drop the workers that evicted it."""
        known = self._known
        before, evicted = use, 0
        # Longest first: long prefixes are evicted before short ones, with which each search starts.
        for digest, size in reversed(prompt.parts):
            entry = known.get(digest)
            if entry is None:
                size = max(size, _LEAST_BYTES)
                known[digest] = Known(worker, 1, size, use)
                self.size += size
            else:
                known.move_to_end(digest)
                if entry.use is not before:
                    before = entry.use
                    evicted = horizons.evicted_by(before.number)
                entry.workers = (entry.workers & ~evicted if evicted else entry.workers) | worker
                entry.use = use
                entry.visits += 1
        while self.size > self._limit:
            self.size -= known.popitem(last=False)[1].size

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self.size = 0
