"""Index of responses by the ids before them, to find the context of given ids.

The text of ids does not always lead to their context. The text may leave out special tokens that were sampled, and a
tokenizer may compose characters (NFC) that a client sent decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_radix_cache.index.item_sets import Items, ItemSet, sorted_set, with_item, without_item
from slime_radix_cache.index.prefix_digests import PrefixDigests, extended
from slime_radix_cache.index.segments import Response, Segment, ids_before

__all__ = ["Starts", "id_before"]

#: The type of packed ids.
_IDS = "int32"


class Starts:
    """Responses by a digest of the tokens before them. A search compares the tokens too."""

    def __init__(self) -> None:
        self._by_digest: dict[int, ItemSet[Response]] = {}
        self._digests = PrefixDigests(_IDS)
        #: Ids and result of the last search, since one request searches several times. Ids are compared by identity.
        self._last: tuple[bytes, list[tuple[Response, int]]] = b"", []

    def add(self, response: Response) -> None:
        """Note where ``response`` begins. O(tokens since the previous response began)."""
        self._last = b"", []
        response.before = _digest_before(response)
        self._digests.add(response.before, id_before(response))
        self._by_digest[response.before] = with_item(self._by_digest.get(response.before), response)

    def remove(self, response: Response) -> None:
        """Undo :meth:`add`."""
        self._last = b"", []
        self._digests.remove(response.before, id_before(response))
        alike = without_item(self._by_digest.pop(response.before), response)
        if alike is not None:
            self._by_digest[response.before] = alike

    def sort(self, response: Response, place: Callable[[Response], int]) -> None:
        """Sort the responses that come after the same tokens as ``response`` by ``place``, the highest last."""
        self._last = b"", []
        self._by_digest[response.before] = sorted_set(self._by_digest[response.before], place)

    def along(self, ids: bytes) -> Sequence[tuple[Response, int]]:
        """Return ``(response, length)`` for each response whose context is a prefix of ``ids`` (packed).

        The context of a response: all tokens before it. ``length``: their number. The longest context comes first;
        among responses with the same context, the newest. O(tokens), plus a comparison of all tokens of each context
        that is not the beginning of another one. The result is kept for a next call with the same object ``ids``.
        """
        known, found = self._last
        if known is not ids or not ids:
            found = self._search(ids)
            self._last = ids, found
        return found

    def _search(self, ids: bytes) -> list[tuple[Response, int]]:
        found: list[tuple[Response, int]] = []
        #: Lengths of contexts in tokens; -1 for a context that ``ids`` do not begin with.
        lengths: dict[tuple[Segment | None, int], int] = {}
        for place, digest in reversed(self._digests.along(ids)):
            alike = self._by_digest.get(digest)
            group: Items[Response] = (alike,) if isinstance(alike, Response) else alike or ()
            for response in reversed(group):
                context = response.parent, response.kept
                if context not in lengths:
                    before = ids_before(response)
                    lengths[context] = -1
                    if ids.startswith(before):
                        _add_lengths(lengths, response, len(before) // 4)
                if lengths[context] == place:
                    found.append((response, place))
        return found


def _add_lengths(lengths: dict[tuple[Segment | None, int], int], here: Segment, place: int) -> None:
    """Add the lengths in tokens of the context before ``here``, and of each beginning of this context.

    ``place``: the token at which ``here`` begins.
    """
    while True:
        lengths[here.parent, here.kept] = place
        if here.parent is None:
            return
        place -= here.kept
        here = here.parent


def id_before(response: Response) -> int:
    """Return the id before ``response``; 0 if there is none."""
    packed = response.parent.packed if response.parent is not None else b""
    return int.from_bytes(packed[4 * response.kept - 4 : 4 * response.kept], "little")


def _digest_before(response: Response) -> int:
    """Return the digest of the tokens before ``response``. It extends the digest of the previous response."""
    since: list[bytes] = []
    digest = 0
    here: Segment = response
    while here.parent is not None:
        since.append(here.parent.packed[: 4 * here.kept])
        here = here.parent
        if isinstance(here, Response):
            digest = here.before
            break
    since.reverse()
    return extended(digest, b"".join(since), _IDS)
