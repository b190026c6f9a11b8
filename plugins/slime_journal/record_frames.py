"""Frames: the records of a log as bytes in a file.

A *frame* has a head and a payload. The payload has the records of one change as msgpack. The head has the length and
the CRC-32 of the payload, and a CRC-32 of these two numbers. One system call writes a frame. A killed process leaves at
most the beginning of its last frame, so a complete head or payload with a wrong CRC is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any
from zlib import crc32

import msgpack  # type: ignore[import-untyped]  # it has no annotations

__all__ = ["Damaged", "Frames", "Torn", "intact_payloads", "payloads"]

_HEAD = Struct("<III")
_LENGTH_AND_SUM = Struct("<II")


class Torn(Exception):
    """The last frame is incomplete; it begins at ``offset``."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class Damaged(Torn):
    """The bytes of a frame are not those that were written."""


def payloads(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield start offset and payload of each frame in ``data``, without decoding records. Raises Torn or Damaged."""
    offset = 0
    while offset < len(data):
        payload = _payload_at(data, offset)
        yield offset, payload
        offset += _HEAD.size + len(payload)


def intact_payloads(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Yield start offset and payload of each intact frame. For damaged bytes between frames, yield offset and None."""
    offset = 0
    while offset < len(data):
        try:
            payload = _payload_at(data, offset)
        except Torn:
            yield offset, None
            rest = range(offset + 1, len(data))
            offset = next((place for place in rest if _is_frame(data, place)), len(data))
        else:
            yield offset, payload
            offset += _HEAD.size + len(payload)


def _is_frame(data: memoryview, offset: int) -> bool:
    try:
        _payload_at(data, offset)
    except Torn:
        return False
    return True


def _payload_at(data: memoryview, offset: int) -> memoryview:
    """Return the payload of the frame at ``offset``. Raises Torn or Damaged."""
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
    return payload


class Frames:
    """Writes and reads records of these ``kinds``, which are NamedTuples. In a frame, a record begins with its kind."""

    def __init__(self, kinds: Sequence[type[Any]]) -> None:
        self._kinds = {kind.__name__.lower(): kind for kind in kinds}
        self._names = {kind: name for name, kind in self._kinds.items()}

    def write(self, records: Sequence[Any]) -> tuple[bytes, bytes]:
        """Return the head and the payload of a frame with ``records``."""
        payload: bytes = msgpack.packb([(self._names[type(record)], *record) for record in records])
        head = _LENGTH_AND_SUM.pack(len(payload), crc32(payload))
        return head + crc32(head).to_bytes(4, "little"), payload

    def read(self, data: memoryview) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield start offset, end offset and records of each frame in ``data``. Raises Torn or Damaged."""
        for offset, payload in payloads(data):
            yield offset, offset + _HEAD.size + len(payload), self._records(payload, offset)

    def read_intact(self, data: memoryview) -> Iterator[tuple[int, list[Any] | None]]:
        """Yield start offset and records of each frame that can be read, and offset and None for damaged bytes."""
        for offset, payload in intact_payloads(data):
            try:
                yield offset, self._records(payload, offset) if payload is not None else None
            except Damaged:
                yield offset, None

    def _records(self, payload: memoryview, offset: int) -> list[Any]:
        try:
            content: list[tuple[Any, ...]] = msgpack.unpackb(payload, use_list=False)
            return [self._kinds[kind](*fields) for kind, *fields in content]
        except (ValueError, TypeError, KeyError):
            raise Damaged(offset) from None
