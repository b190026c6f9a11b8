"""The demoted segments, without their contents: only what is needed to find them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from slime_radix_cache.index.item_sets import ItemSet, items_of, with_item, without_item
from slime_radix_cache.index.prefix_digests import PrefixDigests
from slime_radix_cache.index.segments import Giver, Versions

__all__ = ["ANY_BYTE", "Directory", "Entry", "IdPlace", "State", "TextPlace"]

_K = TypeVar("_K")
#: The value of ``first`` if nothing of the segment's text follows the place: any byte may follow in a text.
ANY_BYTE = -1


@dataclass(slots=True)
class State:
    """The fields of a segment that may change; see Prompt and Response."""

    doubt: str | None = None
    giver: Giver | None = None
    continuation_lost: bool = False
    is_decoded: bool = False


class TextPlace(NamedTuple):
    """The text before a response, or all text up to a prompt's end: its digest and last byte.

    ``first``: the byte after that text, or ANY_BYTE.
    """

    digest: int
    last: int
    first: int


class IdPlace(NamedTuple):
    """The ids before a response: their digest and the last id."""

    digest: int
    last: int


@dataclass(slots=True)
class Entry:
    """A demoted segment. ``serial``: its number, see Runs. ``parent``: its parent's serial, or 0.

    ``text`` and ``ids``: the places where it is found; ``ids`` is None for a prompt. ``tokens``: number of a response's
    tokens; ``versions``: their versions. ``size``: bytes of the record. ``marks``: packed digests of the texts that are
    lost with the segment.
    """

    serial: int
    parent: int
    session: str | None
    text: TextPlace
    ids: IdPlace | None
    state: State
    tokens: int
    versions: Versions
    size: int = 0
    marks: bytes = b""


class Directory:
    """Entries by serial, by session, by place, and by parent."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._children: dict[int, ItemSet[int]] = {}
        self._sessions: dict[str, ItemSet[int]] = {}
        self._texts: dict[int, ItemSet[int]] = {}
        self._ids: dict[int, ItemSet[int]] = {}
        self._text_digests = PrefixDigests("uint8")
        self._id_digests = PrefixDigests("int32")

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, serial: int) -> bool:
        return serial in self._entries

    def add(self, entry: Entry) -> None:
        """Add ``entry``."""
        serial = entry.serial
        self._entries[serial] = entry
        if entry.parent:
            self._children[entry.parent] = with_item(self._children.get(entry.parent), serial)
        if entry.session is not None:
            self._sessions[entry.session] = with_item(self._sessions.get(entry.session), serial)
        self._texts[entry.text.digest] = with_item(self._texts.get(entry.text.digest), serial)
        self._text_digests.add(entry.text.digest, entry.text.last)
        if entry.ids is not None:
            self._ids[entry.ids.digest] = with_item(self._ids.get(entry.ids.digest), serial)
            self._id_digests.add(*entry.ids)

    def remove(self, serial: int) -> Entry:
        """Remove the entry with ``serial`` and return it."""
        entry = self._entries.pop(serial)
        if entry.parent:
            _drop(self._children, entry.parent, serial)
        if entry.session is not None:
            _drop(self._sessions, entry.session, serial)
        _drop(self._texts, entry.text.digest, serial)
        self._text_digests.remove(entry.text.digest, entry.text.last)
        if entry.ids is not None:
            _drop(self._ids, entry.ids.digest, serial)
            self._id_digests.remove(*entry.ids)
        return entry

    def get(self, serial: int) -> Entry | None:
        """Return the entry with ``serial``, or None."""
        return self._entries.get(serial)

    def session_of(self, serial: int) -> str | None:
        """Return the session of a segment, or of a segment that continues it. None if no session is known."""
        rest = [serial]
        for each in rest:
            entry = self.get(each)
            if entry is not None and entry.session is not None:
                return entry.session
            rest += self.children(each)
        return None

    def children(self, serial: int) -> tuple[int, ...]:
        """Return the serials of the demoted segments that continue the segment with ``serial``."""
        return tuple(items_of(self._children.get(serial)))

    def adopt(self, serial: int, parent: int) -> None:
        """Make ``parent``, a serial, the parent of all demoted segments that continue the segment with ``serial``."""
        for child in self.children(serial):
            _drop(self._children, serial, child)
            self._entries[child].parent = parent
            self._children[parent] = with_item(self._children.get(parent), child)

    def of(self, session: str) -> list[Entry]:
        """Return the entries of the responses of ``session``."""
        return [self._entries[serial] for serial in items_of(self._sessions.get(session))]

    def along_text(self, text: bytes) -> Iterator[int]:
        """Yield the serials of prompts and responses that a search for ``text`` may meet. O(text and results)."""
        for length, digest in self._text_digests.along(text):
            for serial in items_of(self._texts.get(digest)):
                first = self._entries[serial].text.first
                if length == len(text) or first in (ANY_BYTE, text[length]):
                    yield serial

    def along_ids(self, ids: bytes) -> Iterator[int]:
        """Yield the serials of responses whose context is a prefix of ``ids`` (packed). O(ids and results)."""
        for _, digest in self._id_digests.along(ids):
            yield from items_of(self._ids.get(digest))

    def with_ancestors(self, serials: Iterable[int]) -> list[Entry]:
        """Return the entries with ``serials`` and their demoted ancestors, in ascending order of serials."""
        found: dict[int, Entry] = {}
        for serial in serials:
            entry = self._entries.get(serial)
            while entry is not None and entry.serial not in found:
                found[entry.serial] = entry
                entry = self._entries.get(entry.parent)
        return [found[serial] for serial in sorted(found)]


def _drop(sets: dict[_K, ItemSet[int]], key: _K, serial: int) -> None:
    rest = without_item(sets.pop(key), serial)
    if rest is not None:
        sets[key] = rest
