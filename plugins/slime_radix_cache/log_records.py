"""What the log of trajectories says, and how it stands in a file.

A *frame* is what one change of the trajectories wrote, with one system call: its length, its CRC-32, a CRC-32 of these
two, and msgpack. A process that is killed leaves a beginning of a frame at most, which cannot be taken for a
damaged one: there the second CRC is whole and wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import msgpack  # type: ignore[import-untyped]  # it has no annotations

from slime_radix_cache.segments import Versions

__all__ = ["Answered", "Asked", "Damaged", "Gone", "Header", "Record", "Seen", "Torn", "frame", "frames"]

_HEAD = Struct("<III")
_LENGTH_AND_SUM = Struct("<II")


class Header(NamedTuple):
    """The first record of a file: its segments are numbered from ``first``, their ids are those of ``tokenizer``.

    It has all of the log since the beginning of file ``oldest``: earlier ones may have been written again into it.
    """

    format: str
    oldest: int
    first: int
    tokenizer: str


class Asked(NamedTuple):
    """A prompt segment became a fact: ``ids`` behind the first ``kept`` tokens of segment ``parent`` (0: none).

    Its text is the first ``shared`` bytes of the parent's, and then ``text``.
    """

    serial: int
    parent: int
    kept: int
    shared: int
    text: bytes
    ids: bytes


class Answered(NamedTuple):
    """A response became a fact; ``start``: where in the text it begins. The other fields as in Asked and Sampled."""

    serial: int
    parent: int
    kept: int
    shared: int
    text: bytes
    start: int
    ids: bytes
    logprobs: bytes | None
    visible: int
    tail: str
    versions: Versions
    finish_reason: str
    session: str | None


class Gone(NamedTuple):
    """A segment, of so many ``tokens``, was evicted, or withdrawn since all of it is told elsewhere.

    ``session``: the one that lost something by it; ``before``: the last that is left of it there (0: nothing).
    """

    serial: int
    tokens: int
    evicted: bool
    session: str | None
    before: int


class Seen(NamedTuple):
    """Weights with this version are served."""

    version: str


Record: TypeAlias = Header | Asked | Answered | Gone | Seen
_KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Header, Asked, Answered, Gone, Seen)
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Torn(Exception):
    """The last frame has no end; ``offset`` is where it begins."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class Damaged(Torn):
    """A frame is not what was written."""


def frame(records: Sequence[Record]) -> tuple[bytes, bytes]:
    """The two pieces of a frame with ``records``."""
    payload: bytes = msgpack.packb([(_NAMES[type(record)], *record) for record in records])
    head = _LENGTH_AND_SUM.pack(len(payload), crc32(payload))
    return head + crc32(head).to_bytes(4, "little"), payload


def frames(data: memoryview) -> Iterator[tuple[int, int, list[Record]]]:
    """Where each frame in ``data`` begins and ends, and its records. Raises Torn or Damaged."""
    offset = 0
    while offset < len(data):
        start = offset + _HEAD.size
        if start > len(data):
            raise Torn(offset)
        length, checksum, head_sum = _HEAD.unpack_from(data, offset)
        if crc32(data[offset : offset + _LENGTH_AND_SUM.size]) != head_sum:
            raise Damaged(offset)
        end = start + length
        if end > len(data):
            raise Torn(offset)
        payload = data[start:end]
        if crc32(payload) != checksum:
            raise Damaged(offset)
        yield offset, end, _records(payload, offset)
        offset = end


def _records(payload: memoryview, offset: int) -> list[Record]:
    try:
        content: list[tuple[Any, ...]] = msgpack.unpackb(payload, use_list=False)
        return [_KINDS[kind](*fields) for kind, *fields in content]
    except (ValueError, TypeError, KeyError):
        raise Damaged(offset) from None
