"""Parts of texts, each tokenised once for all texts that have it."""

from __future__ import annotations

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import anyio

from slime_fairness.turns import FairThreads

__all__ = ["SHORT_PART", "Part", "Parts", "cut"]


#: Texts with at least so many characters are tokenised in a thread: about 1 ms of work, far more than the switch costs.
_LONG_TEXT = 4096
#: Shorter pieces between two seams (see Abilities) are joined with the next ones, because each part costs about 1 µs.
SHORT_PART = 512
_OVERHEAD_BYTES = 300


class Part(NamedTuple):
    """A text to tokenise separately. ``follows``: other tokens come before it. ``framed``: with a BOS and the like."""

    text: str
    follows: bool = False
    framed: bool = False


class _Making(NamedTuple):
    """Parts that are being encoded; ``made`` has their ids once ``done`` is set."""

    done: anyio.Event
    made: dict[Part, bytes]


def cut(
    text: str,
    seams: re.Pattern[str] | None,
    breaks: re.Pattern[str] | None,
    long_part: int,
    *,
    follows: bool = False,
) -> Iterator[Part]:
    """Yield ``text`` in parts that begin at seams. A text longer than ``long_part`` is also cut at breaks.

    For seams and breaks see Abilities. If ``follows`` is True, a part that begins at a break is tokenised as a text
    that follows other tokens, else like any other part. Texts with the same beginning are cut at the same places in
    this beginning, except in the last ``long_part`` characters of the shorter text.
    """
    start = 0
    while len(text) - start > long_part:
        place = breaks.search(text, start + long_part // 2) if breaks is not None else None
        end = place.start() if place is not None else len(text)
        yield from _at_seams(text[start:end], seams, follows=follows and start > 0)
        start = end
    if start < len(text) or not start:
        yield from _at_seams(text[start:], seams, follows=follows and start > 0)


def _at_seams(text: str, seams: re.Pattern[str] | None, *, follows: bool) -> Iterator[Part]:
    start = 0
    for seam in seams.finditer(text, 1) if seams is not None and len(text) >= SHORT_PART else ():
        if seam.start() - start >= SHORT_PART:
            yield Part(text[start : seam.start()], follows=follows and not start)
            start = seam.start()
    yield Part(text[start:], follows=follows and not start)


class Parts:
    """LRU cache of the packed ids of parts. Concurrent requests for the same part wait for one tokenisation.

    ``encode`` tokenises several parts in one call; it runs in a thread if they have many characters. Clients get
    threads in rotation.
    """

    def __init__(
        self, encode: Callable[[Sequence[Part]], list[Sequence[int]]], threads: FairThreads, *, max_bytes: int
    ) -> None:
        self.encoded = self.reused = 0
        self.tokens_encoded = self.tokens_reused = 0
        self._encode = encode
        self._threads = threads
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._known: OrderedDict[Part, bytes] = OrderedDict()
        self._running: dict[Part, _Making] = {}
        self._forgotten = 0

    async def ids(self, parts: Sequence[Part], client: str | None, *, keeps: bool = True) -> bytes:
        """Return the packed int32 ids of ``parts``, joined. Raises the tokenizer's own errors.

        ``keeps``: cache these ids for other texts.
        """
        found: dict[Part, bytes] = {}
        while missing := [part for part in parts if part not in found]:
            mine: list[Part] = []
            size = 0
            for part in dict.fromkeys(missing):
                if part in self._known:
                    self._known.move_to_end(part)
                    found[part] = self._reuse(self._known[part])
                elif part not in self._running:
                    mine.append(part)
                    size += len(part.text)
            if mine:
                found |= await self._make(mine, size, client, keeps)
            elif missing := [part for part in missing if part not in found]:
                making = self._running[missing[0]]
                await making.done.wait()
                for part in dict.fromkeys(missing):
                    if part in making.made:
                        found[part] = self._reuse(making.made[part])
        return b"".join([found[part] for part in parts])

    def made_now(self, part: Part) -> bytes:
        """Return the packed int32 ids of a short ``part``, without the cache. Raises the tokenizer's own errors."""
        (ids,) = self._packed((part,))
        self.encoded += 1
        self.tokens_encoded += len(ids) // 4
        return ids

    def _reuse(self, ids: bytes) -> bytes:
        self.reused += 1
        self.tokens_reused += len(ids) // 4
        return ids

    def forget(self) -> None:
        """Drop all cached parts, and do not cache the parts that are being tokenised now."""
        self._forgotten += 1
        self._known.clear()
        self._size_bytes = 0

    async def _make(self, parts: list[Part], size: int, client: str | None, keeps: bool) -> dict[Part, bytes]:
        if size < _LONG_TEXT:
            return self._made(parts, self._packed(parts), keeps)
        making = _Making(anyio.Event(), {})
        self._running |= dict.fromkeys(parts, making)
        known_since = self._forgotten
        try:
            encoded = await self._threads.run(lambda: self._packed(parts), client)
            making.made.update(self._made(parts, encoded, keeps and known_since == self._forgotten))
            return making.made
        finally:
            for part in parts:
                del self._running[part]
            making.done.set()

    def _packed(self, parts: Sequence[Part]) -> list[bytes]:
        return [array("i", ids).tobytes() for ids in self._encode(parts)]

    def _made(self, parts: list[Part], encoded: list[bytes], keeps: bool) -> dict[Part, bytes]:
        made = dict(zip(parts, encoded, strict=True))
        self.encoded += len(made)
        self.tokens_encoded += sum(map(len, made.values())) // 4
        if keeps:
            self._keep(made)
        return made

    def _keep(self, made: dict[Part, bytes]) -> None:
        for part, ids in made.items():
            self._known[part] = ids
            self._size_bytes += _size_bytes(part, ids)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= _size_bytes(*self._known.popitem(last=False))


def _size_bytes(part: Part, ids: bytes) -> int:
    return sys.getsizeof(part.text) + len(ids) + _OVERHEAD_BYTES
