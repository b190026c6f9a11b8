"""Index of responses by the ids before them: it finds the context of given ids.

The text of the ids does not always lead to their context. It may leave out special tokens that were sampled, and a
tokenizer may compose characters (NFC) that a client sent decomposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from slime_radix_cache.index.rows import Row, items_of, with_item, without_item
from slime_radix_cache.index.segments import Response, Segment, ids_before, links

__all__ = ["Starts"]

_BITS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0, and each can be undone
#: Tokens per step, so that the arrays fit in a core's cache.
_BLOCK = 1 << 15
_POWERS = np.cumprod(np.full(_BLOCK, _FACTOR, np.uint64), dtype=np.uint64)
_INVERSES = np.cumprod(np.full(_BLOCK, pow(_FACTOR, -1, _BITS), np.uint64), dtype=np.uint64)
#: Shifts a digest to its first 20 bits.
_SHIFT = 44
#: The bits of an id that are counted.
_ID_BITS = 0xFFFF


class Starts:
    """Responses by a digest of the tokens before them. A search compares the tokens too."""

    def __init__(self) -> None:
        self._by_digest: dict[int, Row[Response]] = {}
        #: Counts of responses by the id before them, and by the first bits of their digest. The first rule out most
        #: places of a long prompt at once; the second, in a large table that is slow to read, most of the others.
        self._behind = np.full(_ID_BITS + 1, 0, np.uint32)
        self._counts = np.full(1 << 64 - _SHIFT, 0, np.uint32)
        #: The last search. Its ids are compared by identity: one request searches several times.
        self._last: tuple[bytes, list[tuple[Response, int]]] = b"", []

    def add(self, response: Response) -> None:
        """Note where ``response`` begins. O(tokens since the response before it began)."""
        self._last = b"", []
        response.before = _digest_before(response)
        self._behind[_id_before(response)] += 1
        self._by_digest[response.before] = with_item(self._by_digest.get(response.before), response)
        self._counts[response.before >> _SHIFT] += 1

    def remove(self, response: Response) -> None:
        """Undo :meth:`add`."""
        self._last = b"", []
        self._behind[_id_before(response)] -= 1
        self._counts[response.before >> _SHIFT] -= 1
        alike = without_item(self._by_digest.pop(response.before), response)
        if alike is not None:
            self._by_digest[response.before] = alike

    def along(self, ids: bytes) -> Sequence[tuple[Response, int]]:
        """Return responses whose context is a prefix of ``ids`` (packed), with its length: longest first, then newest.

        O(tokens), and a comparison for each such context that no other one continues. The result is kept for the next
        call with the same ``ids``.
        """
        known, found = self._last
        if known is not ids or not ids:
            found = list(self._search(ids))
            self._last = ids, found
        return found

    def _search(self, ids: bytes) -> Iterator[tuple[Response, int]]:
        digest = 0
        found = [(0, 0)] if self._counts[0] else []
        for start, values in _blocks(ids):
            size = len(values)
            values[1:] *= _INVERSES[: size - 1]
            sums = values.cumsum()
            sums += np.uint64(digest)
            places = self._behind.take(np.frombuffer(ids, np.int32, size, 4 * start) & _ID_BITS).nonzero()[0]
            digests = sums[places] * _POWERS[places]
            hits = self._counts[digests >> np.uint64(_SHIFT)].nonzero()[0]
            found += zip((places[hits] + (start + 1)).tolist(), digests[hits].tolist(), strict=True)
            digest = int(sums[-1]) * int(_POWERS[size - 1]) % _BITS
        lengths: dict[tuple[Segment | None, int], int] = {}  # of contexts; -1 if ``ids`` do not begin with it
        for place, digest in reversed(found):
            for response in reversed(items_of(self._by_digest.get(digest))):
                context = response.parent, response.kept
                if context not in lengths:
                    before = ids_before(response)
                    lengths[context] = -1
                    if ids.startswith(before):
                        lengths |= _lengths(response, len(before) // 4)
                if lengths[context] == place:
                    yield response, place


def _lengths(response: Response, place: int) -> dict[tuple[Segment | None, int], int]:
    """Return the lengths of the contexts before ``response``, which begins at ``place``, and before earlier ones."""
    lengths: dict[tuple[Segment | None, int], int] = {(response.parent, response.kept): place}
    for segment, length in links((response.parent, response.kept) if response.parent is not None else None):
        place -= length
        lengths[segment.parent, segment.kept] = place
    return lengths


def _id_before(response: Response) -> int:
    """Return the counted bits of the id before ``response``; those of no id are 0."""
    ids = response.parent.ids if response.parent is not None else b""
    return int.from_bytes(ids[4 * response.kept - 4 : 4 * response.kept], "little") & _ID_BITS


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
