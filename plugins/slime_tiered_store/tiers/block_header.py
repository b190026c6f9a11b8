"""The header in front of a stored block: the block's key, length and checksum, and a checksum of the header itself.

======  ======  ==========================================================
offset  bytes   content
======  ======  ==========================================================
0       8       ``SLIMEBLK``
8       4       version of the format, 1
12      4       length of the bytes behind the header
16      16      key
32      8       XXH3-64 of the bytes behind the header
40      16      zeros
56      8       XXH3-64 of the 56 bytes before
======  ======  ==========================================================

All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

__all__ = ["HEADER_BYTES", "Buffer", "HeaderRows", "block_header", "header_of", "mismatch"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"SLIMEBLK"
_VERSION = 1
_FIELDS = Struct("<8sII16sQ16x")
_SUM = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size
_ROW = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("length", "<u4"),
        ("key", "V16"),
        ("checksum", "<u8"),
        ("zeros", "V16"),
        ("sum", "<u8"),
    ]
)
_WORDS = HEADER_BYTES // 8


def block_header(key: bytes, content: Buffer) -> bytes:
    """Return the header of a block. ``key``: 16 bytes."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(content), key, xxh3_64_intdigest(content))
    return fields + _SUM.pack(xxh3_64_intdigest(fields))


def header_of(data: Buffer) -> tuple[bytes, int, int]:
    """Return key, length and checksum of the content from a header. Raises ValueError, which says what is wrong."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"the header has {len(data)} bytes instead of {HEADER_BYTES}")
    magic, version, length, key, checksum = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("it has no header")
    if _SUM.unpack_from(data, _FIELDS.size)[0] != xxh3_64_intdigest(data[: _FIELDS.size]):
        raise ValueError("its header has a wrong checksum")
    if version != _VERSION:
        raise ValueError(f"its format has version {version}, not {_VERSION}")
    return key, length, checksum


def mismatch(block: memoryview, key: bytes, at_least: int) -> str | None:
    """Compare ``key`` and the content of a block with its header. Return None if they agree, else what is wrong.

    Bytes past the length in the header are ignored. ``at_least``: the number of bytes that the reader wants.
    """
    try:
        found, length, checksum = header_of(block[:HEADER_BYTES])
    except ValueError as error:
        return str(error)
    if found != key:
        return f"its header has the key {found.hex()}"
    if length < at_least:
        return f"it has {length} bytes instead of {at_least}"
    content = block[HEADER_BYTES : HEADER_BYTES + length]
    if len(content) < length:
        return f"it has {len(content)} bytes instead of {length}"
    return None if xxh3_64_intdigest(content) == checksum else "its content has a wrong checksum"


class HeaderRows:
    """The headers of blocks that lie ``slot_bytes`` apart in ``data``, filled or compared all at once.

    A slot begins with a header. ``data`` may be filled anew between two calls.
    """

    def __init__(self, data: memoryview, slot_bytes: int) -> None:
        starts = range(0, len(data), slot_bytes)
        self._fields = [data[start : start + _FIELDS.size] for start in starts]
        self._found = np.ndarray((len(starts), _WORDS), "<u8", data, strides=(slot_bytes, 8))
        self._wanted = np.zeros(len(starts), _ROW)
        self._wanted["magic"], self._wanted["version"] = _MAGIC, _VERSION

    def differing(self, keys: Sequence[bytes], contents: Sequence[Buffer]) -> list[int]:
        """Return the numbers of those slots whose headers are not what :func:`block_header` returns.

        ``keys`` and ``contents`` are those of the blocks that the first slots should hold.
        """
        count = len(keys)
        rows = self._rows(keys, contents)
        # The checksums are those of the fields in ``data``. If these are not the wanted fields, the row differs anyway.
        rows[:, -1] = self._sums(count)
        differing: list[int] = np.flatnonzero((rows != self._found[:count]).any(axis=1)).tolist()
        return differing

    def fill(self, keys: Sequence[bytes], contents: Sequence[Buffer]) -> None:
        """Write into the first slots the headers that :func:`block_header` returns. ``data`` must be writable."""
        count = len(keys)
        self._found[:count] = self._rows(keys, contents)
        self._found[:count, -1] = self._sums(count)

    def _rows(self, keys: Sequence[bytes], contents: Sequence[Buffer]) -> npt.NDArray[np.uint64]:
        """Return the headers of these blocks. The caller has to set their last fields, the checksums of the headers."""
        count = len(keys)
        wanted = self._wanted[:count]
        wanted["length"] = np.fromiter(map(len, contents), np.uint32, count)
        wanted["key"] = np.frombuffer(b"".join(keys), "V16")
        wanted["checksum"] = np.fromiter(map(xxh3_64_intdigest, contents), np.uint64, count)
        return wanted.view("<u8").reshape(count, _WORDS)

    def _sums(self, count: int) -> npt.NDArray[np.uint64]:
        """Return the checksums of the first headers in ``data``."""
        digests = b"".join(map(xxh3_64_digest, self._fields[:count]))  # numbers would take twice the time
        return np.frombuffer(digests, ">u8").astype(np.uint64)
